"""The Hopper kernel by which cards exchange parts, in Mosaic GPU: every card sends its part to all.

A block of threads sends its slices of the part in rounds. In a round the block copies a slice into its area
in the memory of every other card, and raises a flag there. Then the block waits for the flags of all cards
for the slice of the round before, and adds what has come, or keeps all of it. Only plain stores go from card
to card.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int32

from jdllm.pallas.exchange.device_code import (
    MOST_POLLS,
    Cards,
    address_of,
    i32,
    integer,
    load,
    long,
    of_words,
    plus,
    rounded_sum,
    store_by_first,
    widened,
    words_of,
)
from jdllm.pallas.exchange.layout import (
    AREA_BYTES,
    LINE_BYTES,
    MAX_BLOCKS,
    ROUNDS_OFFSET,
    SLOT_BYTES,
    TURNS,
    slot_offset,
)
from jdllm.pallas.ring import COMPILER_PARAMS
from jdllm.pallas.shared_lowering import lowered_once

_THREADS = 128
_VECTOR_BYTES = 16  # that a thread moves at once
_WORDS, _NUMBERS = _VECTOR_BYTES // 4, _VECTOR_BYTES // 2
_MOVE_BYTES = _THREADS * _VECTOR_BYTES  # that a block moves at once
_FEW_BLOCKS = MAX_BLOCKS // 2  # one for each processor, for parts that take a single round then

# What another card has written is in no cache that this processor reads by default.
_RECEIVED = "ld.relaxed.sys.global"

# Operands: the thread, how many cards, the flag on the card so far away, and the number of the round.
_RAISE = """
{
    .reg .pred one;
    setp.lt.u32 one, $0, $1;
    @one st.release.sys.global.u32 [$2], $3;
}
"""

# Operands: the thread, how many cards, the flag of the card so far away, and the number of the round.
_WAIT = f"""
{{
    .reg .pred done;
    .reg .b32 seen, polls;
    setp.ge.u32 done, $0, $1;
    @done bra DONE;
    mov.u32 polls, 0;
WAIT:
    ld.acquire.sys.global.u32 seen, [$2];
    sub.s32 seen, seen, $3;
    setp.ge.s32 done, seen, 0;
    @done bra DONE;
    add.u32 polls, polls, 1;
    setp.lt.u32 done, polls, {MOST_POLLS};
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
    # Not in place: XLA hands over a slice of a stack where it lies, and the sum would go into the stack.
    return _launched(part, addresses, jax.ShapeDtypeStruct(part.shape, part.dtype))


@lowered_once("axis_name")
def join_mosaic_gpu(
    part: Float[Array, "rows d"], addresses: Int32[Array, "1 words"], *, axis_name: str
) -> Float[Array, "all_rows d"]:
    """Hopper form of `jdllm.pallas.exchange.rows_of_all_cards`; `addresses` say which cards there are."""
    del axis_name
    rows, columns = part.shape
    shape = ((addresses.shape[1] // 2 - 1) * rows, columns)
    return _launched(part, addresses, jax.ShapeDtypeStruct(shape, part.dtype))


def _launched(
    part: Float[Array, "rows d"], addresses: Int32[Array, "1 words"], result: jax.ShapeDtypeStruct
) -> Float[Array, "results d"]:
    """The sum of all parts where the result has as many rows as one; otherwise all parts."""
    size = part.size * part.dtype.itemsize
    blocks = _FEW_BLOCKS if size <= _FEW_BLOCKS * AREA_BYTES else MAX_BLOCKS
    kernel = plgpu.kernel(
        functools.partial(_kernel, size=size, blocks=blocks),
        out_type=result,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=COMPILER_PARAMS,
        kernel_name="exchange" if result.shape == part.shape else "join",
    )
    return kernel(part, addresses)


def _kernel(part_ref: Any, addresses_ref: Any, result_ref: Any, *, size: int, blocks: int) -> None:
    cards, adds = addresses_ref.shape[1] // 2 - 1, result_ref.shape == part_ref.shape
    run = functools.partial(_exchange, cards=cards, size=size, blocks=blocks, adds=adds)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)(run)(part_ref, addresses_ref, result_ref)


def _exchange(
    _: Any,
    part_ref: Any,
    addresses_ref: Any,
    result_ref: Any,
    *,
    cards: int,
    size: int,
    blocks: int,
    adds: bool,
) -> None:
    """What a thread does.

    Arguments:
    - `part_ref`, `addresses_ref`, `result_ref`: in the memory of this card.
    - `cards`: how many exchange.
    - `size`: of the part, in bytes.
    - `blocks`: of threads.
    - `adds`: whether the result is the sum of all parts; otherwise it is all parts.
    """
    slices = _Slices(address_of(part_ref), Cards(addresses_ref, cards), size, blocks)
    kind = ir.VectorType.get((_NUMBERS,), ir.MemRefType(part_ref.type).element_type) if adds else None
    result = address_of(result_ref)
    slices.send(integer(0))

    def turn(before: Any, _: Sequence[Any]) -> Sequence[Any]:
        slices.send(plus(before, integer(1)))
        slices.receive(before, result, kind)
        return ()

    if slices.rounds > 1:
        utils.fori(integer(slices.rounds - 1), ())(turn)
    slices.receive(integer(slices.rounds - 1), result, kind)
    slices.end()


class _Slices:
    """The slices of a part that a block of threads sends and receives, one in a round.

    Arguments:
    - `part`: where the part begins.
    - `cards`: who exchanges.
    - `size`: of the part, in bytes.
    - `blocks`: of threads.
    """

    def __init__(self, part: Any, cards: Cards, size: int, blocks: int):
        self._part, self._cards, self._size = part, cards, size
        self._all_bytes = blocks * _MOVE_BYTES  # that all blocks move at once
        moves = -(-size // self._all_bytes)
        self._moves = range(min(moves, AREA_BYTES // _MOVE_BYTES))
        self.rounds = -(-moves // len(self._moves))
        self._whole = size % (self._all_bytes * len(self._moves)) == 0
        self._before = load(plus(cards.line, long(ROUNDS_OFFSET)), i32())
        self._in_area = widened(cards.thread, _VECTOR_BYTES)
        self._first = plus(widened(cards.block, _MOVE_BYTES), self._in_area)
        # A thread raises the flag on the card so far away, and waits for the flag of that card here.
        distance = arith.minui(cards.thread, integer(cards.count - 1))
        in_lines = plus(widened(cards.block, LINE_BYTES), widened(cards.card, 4))
        self._their_flag = plus(cards.memory_at(distance), in_lines)
        flag = arith.remui(plus(cards.card, distance), integer(cards.count))
        self._our_flag = plus(cards.line, widened(flag, 4))

    def send(self, number: Any) -> None:
        """Copy the slice of a round to the other cards, and raise the flags there."""
        area = plus(self._area(number), widened(self._cards.card, SLOT_BYTES))
        places = self._places(number)
        own = [self._load(plus(self._part, place), place) for place, _ in places]
        for memory in self._cards.memories[1:]:
            begin = plus(memory, area)
            for (place, in_area), words in zip(places, own, strict=True):
                self._store(plus(begin, in_area), place, words)
        utils.warpgroup_barrier()
        self._signal(_RAISE, self._their_flag, number)

    def receive(self, number: Any, result: Any, kind: Any) -> None:
        """Wait for the slices of a round from all cards, and store their sum, or each of them.

        Arguments:
        - `result`: where sums begin, or the parts of all cards.
        - `kind`: the type of 16 bytes of sums; `None` to store all slices.
        """
        self._signal(_WAIT, self._our_flag, number)
        utils.warpgroup_barrier()
        here = plus(self._cards.memories[0], self._area(number))
        for place, in_area in self._places(number):
            parts = self._parts(place, plus(here, in_area))
            if kind is None:
                for sender, part in enumerate(parts):
                    self._store(plus(plus(result, long(sender * self._size)), place), place, part)
            else:
                total = words_of(rounded_sum([of_words(part, kind) for part in parts]))
                self._store(plus(result, place), place, total)

    def _parts(self, place: Any, received: Any) -> list[tuple[Any, ...]]:
        """The words of all cards at a place of their parts; those of the first card are `received` there."""
        own, parts = plus(self._part, place), []
        for sender in range(self._cards.count):
            is_own = arith.cmpi(arith.CmpIPredicate.eq, self._cards.card, integer(sender))
            address = arith.select(is_own, own, plus(received, long(sender * SLOT_BYTES)))
            parts.append(self._load(address, place, _RECEIVED))
        return parts

    def end(self) -> None:
        """Count the rounds."""
        after = plus(self._before, integer(self.rounds))
        store_by_first(self._cards.thread, plus(self._cards.line, long(ROUNDS_OFFSET)), after)

    def _signal(self, signal: str, flag: Any, number: Any) -> None:
        cards, counted = self._cards, self._counted(number)
        utils.inline_ptx(signal, cards.thread, integer(cards.count), flag, counted, has_side_effects=True)

    def _counted(self, number: Any) -> Any:
        """The number of a round, counted over all sums."""
        return plus(plus(self._before, integer(1)), number)

    def _area(self, number: Any) -> Any:
        """How far from the beginning of a card's memory the block's area for the first sender is."""
        of_turn = arith.andi(self._counted(number), integer(TURNS - 1))
        turn = widened(of_turn, self._cards.count * SLOT_BYTES)
        first = slot_offset(0, 0, self._cards.count)
        return plus(plus(turn, widened(self._cards.block, AREA_BYTES)), long(first))

    def _places(self, number: Any) -> list[tuple[Any, Any]]:
        """Where each vector of the thread lies in a round: in the part, and in the area."""
        begin = plus(self._first, widened(number, self._all_bytes * len(self._moves)))
        return [
            (plus(begin, long(move * self._all_bytes)), plus(self._in_area, long(move * _MOVE_BYTES)))
            for move in self._moves
        ]

    def _load(self, address: Any, place: Any, how: str = "ld.global") -> tuple[Any, ...]:
        """Words at an address; zeros where their `place` is beyond the end of the part."""
        ptx, operands = f"{how}.v4.b32 {{$0, $1, $2, $3}}, [$4];", [address]
        if not self._whole:
            zeros = " ".join(f"mov.b32 ${word}, 0;" for word in range(_WORDS))
            ptx = f"{{ .reg .pred inside; setp.lt.u64 inside, $5, $6; {zeros} @inside {ptx} }}"
            operands += [place, long(self._size)]
        return utils.inline_ptx(ptx, *operands, result_types=[i32()] * _WORDS, has_side_effects=True)

    def _store(self, address: Any, place: Any, words: tuple[Any, ...]) -> None:
        """Words to an address; nothing where their `place` is beyond the end of the part."""
        ptx, operands = "st.global.v4.b32 [$0], {$1, $2, $3, $4};", [address, *words]
        if not self._whole:
            ptx = f"{{ .reg .pred inside; setp.lt.u64 inside, $5, $6; @inside {ptx} }}"
            operands += [place, long(self._size)]
        utils.inline_ptx(ptx, *operands, has_side_effects=True)
