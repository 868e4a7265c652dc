"""The sum over cards of a row that a block of threads has in registers, inside kernels of Pallas."""

import functools
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jdllm.pallas.exchange.peers import (
    RECEIVED,
    Peers,
    address_of,
    i32,
    long,
    of_words,
    plus,
    rounded_sum,
    widened,
    words_of,
)

_THREADS = 128


def sum_row_over_cards(row: Float[Array, " d"], addresses_ref: Any, layout: Any) -> Float[Array, " d"]:
    """The sum of what all cards have, in f32 in the order of the cards, rounded once.

    Arguments:
    - `row`: what this block has, in numbers of 16 bits: at most `AREA_BYTES` of
      `jdllm.pallas.exchange.layout`. A block is one warpgroup, and a kernel has at most `BLOCKS` blocks.
    - `addresses_ref`: this card's row of `jdllm.pallas.exchange.addresses_of`, `[1, words]`.
    - `layout`: of the row, `WG_STRIDED`, in vectors of whole words.
    """
    run = functools.partial(_exchange, cards=addresses_ref.shape[1] // 2 - 1)
    result = plgpu.ShapeDtypeStruct(row.shape, row.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)(run)(row, addresses_ref)


def _exchange(_: Any, row: mgpu.FragmentedArray, addresses_ref: Any, *, cards: int) -> mgpu.FragmentedArray:
    """What a thread does."""
    peers, kind = Peers(address_of(addresses_ref), cards), row.registers[0].type
    own = [words_of(register) for register in row.registers]
    vector_bytes = 4 * len(own[0])
    first = widened(peers.thread, vector_bytes)
    offsets = [plus(first, long(number * _THREADS * vector_bytes)) for number in range(len(own))]
    for area in peers.sent_to:
        for offset, words in zip(offsets, own, strict=True):
            _store(plus(area, offset), words)
    peers.agree()
    registers = [
        rounded_sum([of_words(_load(plus(area, offset), len(own[0])), kind) for area in peers.received])
        for offset in offsets
    ]
    peers.end()
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object), _layout=row.layout, _is_signed=None
    )


def _store(address: Any, words: tuple[Any, ...]) -> None:
    places = ", ".join(f"${1 + place}" for place in range(len(words)))
    store = f"st.global.v{len(words)}.b32 [$0], {{{places}}};"
    utils.inline_ptx(store, address, *words, has_side_effects=True)


def _load(address: Any, count: int) -> tuple[Any, ...]:
    places = ", ".join(f"${place}" for place in range(count))
    load = f"{RECEIVED}.v{count}.b32 {{{places}}}, [${count}];"
    return utils.inline_ptx(load, address, result_types=[i32()] * count, has_side_effects=True)
