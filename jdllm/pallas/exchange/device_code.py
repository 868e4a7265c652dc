"""Pieces of kernels that exchange, in Mosaic GPU: who the cards are, addresses, sums and words."""

import functools
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from jdllm.pallas.exchange.layout import LINE_BYTES

MOST_POLLS = 2**25
"""Then a thread that waits ends the program with an error, after some ten seconds: other cards may still load
their programs."""


class Cards:
    """What a thread knows of the cards.

    Arguments:
    - `addresses_ref`: this card's row of `jdllm.pallas.exchange.addresses_of`, in memory.
    - `count`: how many cards exchange.

    - `thread`, `block`: the number of the thread in its block, and of the block.
    - `card`: the number of this card.
    - `memories`: where the memory of this card begins, and that of the cards behind it, in a ring.
    - `line`: where the line of the block is in the memory of this card.
    """

    def __init__(self, addresses_ref: Any, count: int):
        self.count = count
        self.thread, self.block = _index(gpu.thread_id), _index(gpu.block_id)
        self._addresses = address_of(addresses_ref)
        self.card = load(self._addresses, i32())
        self.memories = [load(plus(self._addresses, long(8 + 8 * entry)), i64()) for entry in range(count)]
        self.line = plus(self.memories[0], widened(self.block, LINE_BYTES))

    def memory_at(self, distance: Any) -> Any:
        """Where the memory of the card begins that is so far behind this one, as only the device knows."""
        return load(plus(self._addresses, plus(widened(distance, 8), long(8))), i64())


def rounded_sum(parts: Sequence[Any]) -> Any:
    """The sum of vectors of 16-bit numbers in their order, in f32, rounded once."""
    return arith.truncf(parts[0].type, functools.reduce(arith.addf, map(extended, parts)))


def extended(numbers: Any) -> Any:
    """A vector of 16-bit numbers in f32."""
    return arith.extf(ir.VectorType.get(ir.VectorType(numbers.type).shape, ir.F32Type.get()), numbers)


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


def store_by_first(thread: Any, address: Any, word: Any) -> None:
    """The first thread of a block stores a word."""
    first = arith.cmpi(arith.CmpIPredicate.eq, thread, integer(0))
    utils.inline_ptx("st.global.u32 [$0], $1;", address, word, predicate=first, has_side_effects=True)


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
