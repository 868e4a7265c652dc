"""The Hopper kernel of a sum over cards, in Mosaic GPU: every card sends its part to all, and adds all parts.

A block of threads copies its slice of the part into its area of the memory of every card. Then the block adds
the slices that have come.
"""

import functools
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxtyping import Array, Float, Int32

from jdllm.pallas.exchange.layout import BLOCKS
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
from jdllm.pallas.ring import COMPILER_PARAMS
from jdllm.pallas.shared_lowering import lowered_once

_THREADS = 128
_VECTOR_BYTES = 16  # that a thread moves at once
_BLOCK_BYTES = _THREADS * _VECTOR_BYTES  # that a block moves at once
_TURN_BYTES = BLOCKS * _BLOCK_BYTES  # that all threads move at once
_WORDS = _VECTOR_BYTES // 4
_NUMBERS = _VECTOR_BYTES // 2


@lowered_once("axis_name")
def exchange_mosaic_gpu(
    part: Float[Array, "rows d"], addresses: Int32[Array, "1 words"], *, axis_name: str
) -> Float[Array, "rows d"]:
    """Hopper form of `jdllm.pallas.exchange.sum_over_cards`; `addresses` say which cards there are."""
    del axis_name
    kernel = plgpu.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct(part.shape, part.dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        compiler_params=COMPILER_PARAMS,
        kernel_name="exchange",
    )
    return kernel(part, addresses)


def _kernel(part_ref: Any, addresses_ref: Any, sum_ref: Any) -> None:
    rows, d = part_ref.shape
    run = functools.partial(
        _exchange, cards=addresses_ref.shape[1] // 2 - 1, size=rows * d * part_ref.dtype.itemsize
    )
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)(run)(part_ref, addresses_ref, sum_ref)


def _exchange(_: Any, part_ref: Any, addresses_ref: Any, sum_ref: Any, *, cards: int, size: int) -> None:
    """What a thread does.

    Arguments:
    - `part_ref`, `addresses_ref`, `sum_ref`: in the memory of this card.
    - `cards`: how many exchange.
    - `size`: of the part, in bytes.
    """
    part, total = map(address_of, (part_ref, sum_ref))
    kind = ir.VectorType.get((_NUMBERS,), ir.MemRefType(part_ref.type).element_type)
    peers = Peers(address_of(addresses_ref), cards)
    in_block = widened(peers.thread, _VECTOR_BYTES)
    first = plus(widened(peers.block, _BLOCK_BYTES), in_block)
    # Where each vector of the thread lies: in the part, and in the block's area.
    offsets = [
        (plus(first, long(move * _TURN_BYTES)), plus(in_block, long(move * _BLOCK_BYTES)))
        for move in range(-(-size // _TURN_BYTES))
    ]
    moves = _Moves(size)
    own = [moves.load(part, offset, offset) for offset, _ in offsets]
    for area in peers.sent_to:
        for (offset, in_area), words in zip(offsets, own, strict=True):
            moves.store(area, in_area, offset, words)
    peers.agree()
    for offset, in_area in offsets:
        received = [moves.load(area, in_area, offset, RECEIVED) for area in peers.received]
        added = rounded_sum([of_words(words, kind) for words in received])
        moves.store(total, offset, offset, words_of(added))
    peers.end()


class _Moves:
    """Loads and stores of 16 bytes, of which those beyond the end of a part do nothing.

    Arguments:
    - `size`: of a part, in bytes.
    """

    def __init__(self, size: int):
        self._size = size
        self._whole = size % _TURN_BYTES == 0

    def load(self, base: Any, offset: Any, in_part: Any, how: str = "ld.global") -> tuple[Any, ...]:
        """Words at `offset` from an address, which are those at `in_part` of a part."""
        load = f"{how}.v4.b32 {{$0, $1, $2, $3}}, [$4];"
        at = [plus(base, offset)]
        if not self._whole:
            zeros = " ".join(f"mov.b32 ${word}, 0;" for word in range(_WORDS))
            load = f"{{ .reg .pred inside; setp.lt.u64 inside, $5, $6; {zeros} @inside {load} }}"
            at += [in_part, long(self._size)]
        return utils.inline_ptx(load, *at, result_types=[i32()] * _WORDS, has_side_effects=True)

    def store(self, base: Any, offset: Any, in_part: Any, words: tuple[Any, ...]) -> None:
        """Put words where `load` reads them."""
        store = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        operands = [plus(base, offset), *words]
        if not self._whole:
            store = f"{{ .reg .pred inside; setp.lt.u64 inside, $5, $6; @inside {store} }}"
            operands += [in_part, long(self._size)]
        utils.inline_ptx(store, *operands, has_side_effects=True)
