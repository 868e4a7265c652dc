"""The sum over cards of a row that a block of threads has in registers, inside kernels of Pallas.

Every word goes to the other cards with the number of the row beside it, in one store of 64 bits. A thread
that waits for a word reads the pair until the number is right. So nothing else has to be agreed.
"""

import functools
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float

from jdllm.pallas.exchange.device_code import (
    MOST_POLLS,
    Cards,
    extended,
    i32,
    integer,
    load,
    long,
    of_words,
    plus,
    store_by_first,
    widened,
    words_of,
)
from jdllm.pallas.exchange.layout import ROW_AREA_BYTES, ROWS_OFFSET, row_slot_offset

_THREADS = 128
_WORDS = 2  # of a register: four numbers of 16 bits
_PAIRS_BYTES = 8 * _WORDS  # of a register's words with the number of the row beside each


def sum_row_over_cards(row: Float[Array, " d"], addresses_ref: Any, layout: Any) -> Float[Array, " d"]:
    """The sum of what all cards have, in f32 in the order of the cards, rounded once.

    Arguments:
    - `row`: what this block has, at most `MAX_COLUMNS` numbers of 16 bits
      (`jdllm.pallas.exchange.layout`). A block is one warpgroup, and a kernel has at most `ROW_AREAS` blocks.
    - `addresses_ref`: this card's row of `jdllm.pallas.exchange.addresses_of`, `[1, words]`.
    - `layout`: of the row: `WG_STRIDED`, in vectors of four.
    """
    run = functools.partial(_exchange, count=addresses_ref.shape[1] // 2 - 1)
    result = plgpu.ShapeDtypeStruct(row.shape, row.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)(run)(row, addresses_ref)


def _exchange(_: Any, row: mgpu.FragmentedArray, addresses_ref: Any, *, count: int) -> mgpu.FragmentedArray:
    """What a thread does."""
    cards, own = Cards(addresses_ref, count), [words_of(register) for register in row.registers]
    counter = plus(cards.line, long(ROWS_OFFSET))
    number = plus(load(counter, i32()), integer(1))
    slot_bytes = row_slot_offset(0, 1, count) - row_slot_offset(0, 0, count)
    turn = widened(arith.andi(number, integer(1)), count * slot_bytes)
    area = plus(turn, widened(cards.block, ROW_AREA_BYTES))
    first = plus(plus(area, widened(cards.thread, _PAIRS_BYTES)), long(row_slot_offset(0, 0, count)))
    places = [long(register * _THREADS * _PAIRS_BYTES) for register in range(len(own))]
    sent = plus(first, widened(cards.card, slot_bytes))
    for memory in (*cards.memories[1:], cards.memories[0]):  # what is far first
        begin = plus(memory, sent)
        for place, words in zip(places, own, strict=True):
            _send(plus(begin, place), words, number)
    kind, totals = row.registers[0].type, None
    for sender in range(count):
        received = _receive(plus(plus(cards.memories[0], first), long(sender * slot_bytes)), len(own), number)
        wide = [extended(of_words(words, kind)) for words in received]
        totals = wide if totals is None else list(map(arith.addf, totals, wide))
    utils.warpgroup_barrier()  # all threads have read the counter
    store_by_first(cards.thread, counter, number)
    assert totals is not None
    registers = np.array([arith.truncf(kind, total) for total in totals], dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=row.layout, _is_signed=None)


def _send(address: Any, words: tuple[Any, ...], number: Any) -> None:
    ptx = """
{
    .reg .b64 a, b;
    mov.b64 a, {$1, $3};
    mov.b64 b, {$2, $3};
    st.relaxed.sys.global.v2.b64 [$0], {a, b};
}
"""
    utils.inline_ptx(ptx, address, *words, number, has_side_effects=True)


def _receive(address: Any, registers: int, number: Any) -> list[tuple[Any, ...]]:
    """The words of a sender, by register, once all have come."""
    words = registers * _WORDS
    loads, checks = [], []
    for register in range(registers):
        a, b = _WORDS * register, _WORDS * register + 1
        at = register * _THREADS * _PAIRS_BYTES
        loads.append(f"ld.relaxed.sys.global.v2.b64 {{p{a}, p{b}}}, [from + {at}];")
        for word in (a, b):
            checks.append(f"mov.b64 {{${word}, n}}, p{word}; xor.b32 n, n, number; or.b32 wrong, wrong, n;")
    ptx = f"""
{{
    .reg .pred again;
    .reg .b32 wrong, n, number, polls;
    .reg .b64 from, p<{words}>;
    mov.b64 from, ${words};
    mov.b32 number, ${words + 1};
    mov.u32 polls, 0;
READ:
    mov.u32 wrong, 0;
    {" ".join(loads)}
    {" ".join(checks)}
    setp.eq.u32 again, wrong, 0;
    @again bra DONE;
    add.u32 polls, polls, 1;
    setp.lt.u32 again, polls, {MOST_POLLS};
    @again bra READ;
    trap;
DONE:
}}
"""
    found = utils.inline_ptx(ptx, address, number, result_types=[i32()] * words, has_side_effects=True)
    return [found[begin : begin + _WORDS] for begin in range(0, words, _WORDS)]
