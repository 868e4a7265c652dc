"""The Hopper kernel of a sum over cards, in Mosaic GPU: every card sends its part to all, and adds all parts.

A block of threads copies its slice of the part into the memory of every card, and raises a flag there. Then
the block waits for the flags of all cards, and adds the slices that have come. Only plain stores go from card
to card. A block that waits too long ends the program with an error.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array, Float, Int32

from jdllm.pallas.exchange.layout import BLOCKS, COUNT_OFFSET, LINE_BYTES, SLOT_BYTES, slot_offset
from jdllm.pallas.ring import COMPILER_PARAMS
from jdllm.pallas.shared_lowering import lowered_once

_THREADS = 128
_VECTOR_BYTES = 16  # that a thread moves at once
_TURN_BYTES = BLOCKS * _THREADS * _VECTOR_BYTES  # that all threads move at once
_WORDS = _VECTOR_BYTES // 4
_MOST_POLLS = 2**25  # some ten seconds: other cards may still load their programs

# What another card has written is in no cache that this processor reads by default.
_RECEIVED = "ld.relaxed.sys.global"

# A thread for each card raises this block's flag there, and waits for the flag of that card here.
# Operands: the thread, how many cards, both flags, and the number of this sum.
_RAISE_AND_WAIT = f"""
{{
    .reg .pred done;
    .reg .b32 seen, polls;
    setp.ge.u32 done, $0, $1;
    @done bra DONE;
    st.release.sys.global.u32 [$2], $4;
    mov.u32 polls, 0;
WAIT:
    ld.acquire.sys.global.u32 seen, [$3];
    sub.s32 seen, seen, $4;
    setp.ge.s32 done, seen, 0;
    @done bra DONE;
    add.u32 polls, polls, 1;
    setp.lt.u32 done, polls, {_MOST_POLLS};
    @done bra WAIT;
    trap;
DONE:
}}
"""


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
        _exchange,
        cards=addresses_ref.shape[1] // 2 - 1,
        size=rows * d * part_ref.dtype.itemsize,
        bfloat16=part_ref.dtype == jnp.bfloat16,
    )
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)(run)(part_ref, addresses_ref, sum_ref)


def _exchange(
    _: Any, part_ref: Any, addresses_ref: Any, sum_ref: Any, *, cards: int, size: int, bfloat16: bool
) -> None:
    """What a thread does.

    Arguments:
    - `part_ref`, `addresses_ref`, `sum_ref`: in the memory of this card.
    - `cards`: how many exchange.
    - `size`: of the part, in bytes.
    - `bfloat16`: whether numbers are bfloat16, float16 otherwise.
    """
    part, addresses, total = map(_address_of, (part_ref, addresses_ref, sum_ref))
    thread, block = _index(gpu.thread_id), _index(gpu.block_id)
    card = _load(addresses, _i32())
    memories = [_load(_plus(addresses, _long(8 + 8 * entry)), _i64()) for entry in range(cards)]
    step = arith.minui(thread, _int(cards - 1))  # what a thread raises and waits for: the card so far away
    signalled = _load(_plus(addresses, _plus(_widened(step, 8), _long(8))), _i64())
    line = _plus(memories[0], _widened(block, LINE_BYTES))
    first = _plus(_widened(block, _THREADS * _VECTOR_BYTES), _widened(thread, _VECTOR_BYTES))
    offsets = [_plus(first, _long(start)) for start in range(0, size, _TURN_BYTES)]
    move = _Moves(size)
    own_part = [move.load(part, offset) for offset in offsets]

    count = arith.addi(_load(_plus(line, _long(COUNT_OFFSET)), _i32()), _int(1))
    turn_bytes = slot_offset(1, 0, cards) - slot_offset(0, 0, cards)
    turn = _widened(arith.andi(count, _int(1)), turn_bytes)
    sent_to = _plus(turn, _plus(_widened(card, SLOT_BYTES), _long(slot_offset(0, 0, cards))))
    for memory in (*memories[1:], memories[0]):  # what is far first
        slot = _plus(memory, sent_to)
        for offset, words in zip(offsets, own_part, strict=True):
            move.store(slot, offset, words)
    utils.warpgroup_barrier()
    theirs = _plus(signalled, _plus(_widened(block, LINE_BYTES), _widened(card, 4)))
    ours = _plus(line, _widened(arith.remui(arith.addi(card, step), _int(cards)), 4))
    utils.inline_ptx(_RAISE_AND_WAIT, thread, _int(cards), theirs, ours, count, has_side_effects=True)
    utils.warpgroup_barrier()

    slots = [_plus(_plus(memories[0], turn), _long(slot_offset(0, sender, cards))) for sender in range(cards)]
    for offset in offsets:
        received = [move.load(slot, offset, _RECEIVED) for slot in slots]
        move.store(total, offset, _rounded_sum(received, bfloat16))
    first_thread = arith.cmpi(arith.CmpIPredicate.eq, thread, _int(0))
    at = _plus(line, _long(COUNT_OFFSET))
    utils.inline_ptx("st.global.u32 [$0], $1;", at, count, predicate=first_thread, has_side_effects=True)


class _Moves:
    """Loads and stores of 16 bytes, of which those beyond the end do nothing.

    Arguments:
    - `size`: of a part, in bytes.
    """

    def __init__(self, size: int):
        self._size = size
        self._whole = size % _TURN_BYTES == 0

    def load(self, base: Any, offset: Any, how: str = "ld.global") -> tuple[Any, ...]:
        load = f"{how}.v4.b32 {{$0, $1, $2, $3}}, [$4];"
        at = [_plus(base, offset)]
        if not self._whole:
            zeros = " ".join(f"mov.b32 ${word}, 0;" for word in range(_WORDS))
            load = f"{{ .reg .pred inside; setp.lt.u64 inside, $5, $6; {zeros} @inside {load} }}"
            at += [offset, _long(self._size)]
        return utils.inline_ptx(load, *at, result_types=[_i32()] * _WORDS, has_side_effects=True)

    def store(self, base: Any, offset: Any, words: tuple[Any, ...]) -> None:
        store = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        operands = [_plus(base, offset), *words]
        if not self._whole:
            store = f"{{ .reg .pred inside; setp.lt.u64 inside, $5, $6; @inside {store} }}"
            operands += [offset, _long(self._size)]
        utils.inline_ptx(store, *operands, has_side_effects=True)


def _rounded_sum(parts: list[tuple[Any, ...]], bfloat16: bool) -> tuple[Any, ...]:
    """The sum of vectors in their order, in f32, rounded once."""
    numbers = _WORDS * 2
    short = ir.VectorType.get((numbers,), ir.BF16Type.get() if bfloat16 else ir.F16Type.get())
    long = ir.VectorType.get((numbers,), ir.F32Type.get())
    packed = ir.VectorType.get((_WORDS,), _i32())
    wide = [
        arith.extf(long, vector.bitcast(short, vector.from_elements(packed, list(words)))) for words in parts
    ]
    total = vector.bitcast(packed, arith.truncf(short, functools.reduce(arith.addf, wide)))
    return tuple(vector.extract(total, [], [word]) for word in range(_WORDS))


def _load(address: Any, kind: Any) -> Any:
    bits = ir.IntegerType(kind).width
    return utils.inline_ptx(f"ld.global.u{bits} $0, [$1];", address, result_types=kind, has_side_effects=True)


def _index(of: Any) -> Any:
    return arith.index_cast(_i32(), of(gpu.Dimension.x))


def _address_of(ref: Any) -> Any:
    return llvm.ptrtoint(_i64(), utils.memref_ptr(ref))


def _widened(number: Any, factor: int) -> Any:
    """An unsigned number of 32 bits as one of 64 bits, times a factor."""
    return arith.muli(arith.extui(_i64(), number), _long(factor))


def _plus(a: Any, b: Any) -> Any:
    return arith.addi(a, b)


def _int(value: int) -> Any:
    return utils.c(value, _i32())


def _long(value: int) -> Any:
    return utils.c(value, _i64())


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _i64() -> Any:
    return ir.IntegerType.get_signless(64)
