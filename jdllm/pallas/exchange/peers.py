"""What a block of threads of a kernel does to exchange with the same block of other cards, in Mosaic GPU.

The block writes into its area of a slot in the memory of every card, and raises a flag there. Then the block
waits for the flags of all cards. Only plain stores go from card to card. A block that waits too long ends the
program with an error. A block must be one warpgroup.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from jdllm.pallas.exchange.layout import AREA_BYTES, COUNT_OFFSET, LINE_BYTES, slot_offset

_MOST_POLLS = 2**25  # some ten seconds: other cards may still load their programs

RECEIVED = "ld.relaxed.sys.global"
"""A load of what another card has written, which is in no cache that a processor reads by default."""

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


class Peers:
    """One sum of this block of threads. Everything that it makes runs in the order of the calls.

    Arguments:
    - `addresses`: where this card's row of `jdllm.pallas.exchange.addresses_of` lies.
    - `cards`: how many exchange.

    - `thread`, `block`: the number of the thread in its block, and of the block.
    - `sent_to`: this block's area in the memory of every card: what is far first.
    - `received`: this block's areas in the memory of this card, in the order of the cards that send.
    """

    def __init__(self, addresses: Any, cards: int):
        self.thread, self.block = _index(gpu.thread_id), _index(gpu.block_id)
        self._cards = cards
        self._card = load(addresses, i32())
        memories = [load(plus(addresses, long(8 + 8 * entry)), i64()) for entry in range(cards)]
        # What a thread raises and waits for: the card so far away.
        self._step = arith.minui(self.thread, integer(cards - 1))
        signalled = load(plus(addresses, plus(widened(self._step, 8), long(8))), i64())
        in_lines = widened(self.block, LINE_BYTES)
        self._line = plus(memories[0], in_lines)
        self._their_flag = plus(signalled, plus(in_lines, widened(self._card, 4)))
        self._count = arith.addi(load(plus(self._line, long(COUNT_OFFSET)), i32()), integer(1))
        turn_bytes = slot_offset(1, 0, cards) - slot_offset(0, 0, cards)
        turn = widened(arith.andi(self._count, integer(1)), turn_bytes)
        area = plus(turn, widened(self.block, AREA_BYTES))
        own_slot = slot_offset(0, 1, cards) - slot_offset(0, 0, cards)
        sent = plus(plus(area, widened(self._card, own_slot)), long(slot_offset(0, 0, cards)))
        self.sent_to = [plus(memory, sent) for memory in (*memories[1:], memories[0])]
        here = plus(memories[0], area)
        self.received = [plus(here, long(slot_offset(0, sender, cards))) for sender in range(cards)]

    def agree(self) -> None:
        """Wait until all cards have written what this block adds."""
        flag = arith.remui(arith.addi(self._card, self._step), integer(self._cards))
        ours = plus(self._line, widened(flag, 4))
        operands = self.thread, integer(self._cards), self._their_flag, ours, self._count
        utils.warpgroup_barrier()
        utils.inline_ptx(_RAISE_AND_WAIT, *operands, has_side_effects=True)
        utils.warpgroup_barrier()

    def end(self) -> None:
        """Count the sum."""
        first = arith.cmpi(arith.CmpIPredicate.eq, self.thread, integer(0))
        at = plus(self._line, long(COUNT_OFFSET))
        utils.inline_ptx("st.global.u32 [$0], $1;", at, self._count, predicate=first, has_side_effects=True)


def rounded_sum(parts: Sequence[Any]) -> Any:
    """The sum of vectors of 16-bit numbers in their order, in f32, rounded once."""
    kind = ir.VectorType(parts[0].type)
    wide = ir.VectorType.get(kind.shape, ir.F32Type.get())
    total = functools.reduce(arith.addf, [arith.extf(wide, part) for part in parts])
    return arith.truncf(kind, total)


def of_words(words: Sequence[Any], kind: Any) -> Any:
    """Words of 32 bits as a vector of another type."""
    packed = ir.VectorType.get((len(words),), i32())
    return vector.bitcast(kind, vector.from_elements(packed, list(words)))


def words_of(numbers: Any) -> tuple[Any, ...]:
    """A vector as words of 32 bits."""
    kind = ir.VectorType(numbers.type)
    count = kind.shape[0] * utils.bitwidth(kind.element_type) // 32
    packed = vector.bitcast(ir.VectorType.get((count,), i32()), numbers)
    return tuple(vector.extract(packed, [], [word]) for word in range(count))


def load(address: Any, kind: Any) -> Any:
    bits = ir.IntegerType(kind).width
    return utils.inline_ptx(f"ld.global.u{bits} $0, [$1];", address, result_types=kind, has_side_effects=True)


def address_of(ref: Any) -> Any:
    return llvm.ptrtoint(i64(), utils.memref_ptr(ref))


def widened(number: Any, factor: int) -> Any:
    """An unsigned number of 32 bits as one of 64 bits, times a factor."""
    return arith.muli(arith.extui(i64(), number), long(factor))


def plus(a: Any, b: Any) -> Any:
    return arith.addi(a, b)


def integer(value: int) -> Any:
    return utils.c(value, i32())


def long(value: int) -> Any:
    return utils.c(value, i64())


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    return ir.IntegerType.get_signless(64)


def _index(of: Any) -> Any:
    return arith.index_cast(i32(), of(gpu.Dimension.x))
