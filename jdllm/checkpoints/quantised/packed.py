"""A matrix that a checkpoint stores in few bits, as it is read."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.checkpoints.index import DTYPES, Numbers, StoredTensor
from jdllm.errors import CheckpointError
from jdllm.quantised import KINDS, WeightForm

Parts = Mapping[str, StoredTensor]
Decode = Callable[[Parts, range], np.ndarray]
"""Returns rows of a matrix, or what a device keeps of them, from what is stored of it."""


@dataclasses.dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A matrix by what is stored of it. `dtype` and `shape` are those of its values.

    - `parts`: what is stored; `file` and `offset` are those of the first.
    - `decode`: how rows come out of the parts.
    - `kept`: what a device keeps of the matrix in those forms of `jdllm.quantised` that have these values.
    - `first_row`: of the stored matrix.
    - `may_round`: whether a device rounds the matrix to 8 bits where others of the model stay in 4 bits.
    """

    parts: Parts
    decode: Decode
    kept: tuple[Numbers, ...] = ()
    first_row: int = 0
    may_round: bool = False

    @classmethod
    def of(
        cls,
        parts: Parts,
        dtype: str,
        shape: tuple[int, ...],
        decode: Decode,
        kept: tuple[Numbers, ...] = (),
        *,
        may_round: bool = False,
    ) -> "PackedTensor":
        """The matrix of these parts, all of it."""
        first = next(iter(parts.values()))
        return cls(first.file, dtype, shape, first.offset, parts, decode, kept, may_round=may_round)

    def numbers_in(self, form: WeightForm) -> Numbers | None:
        return next((numbers for numbers in self.kept if numbers.form == form), None)

    def rows(self, first: int, count: int) -> "PackedTensor":
        shape, kept = (count, *self.shape[1:]), tuple(numbers.rows(first, count) for numbers in self.kept)
        return dataclasses.replace(self, shape=shape, kept=kept, first_row=self.first_row + first)

    def read(self, part: Sequence[range]) -> np.ndarray:
        """Some of its rows. The array may be a view with other strides than those of its shape."""
        rows, *others = part
        stored = range(self.first_row + rows.start, self.first_row + rows.stop)
        return self.decode(self.parts, stored)[:, *(slice(axis.start, axis.stop) for axis in others)]


def rows_of(stored: StoredTensor, rows: range) -> np.ndarray:
    """Some rows of a stored tensor, whole."""
    return stored.read([rows, *stored.whole[1:]])


def all_of(stored: StoredTensor) -> np.ndarray:
    """The whole of a stored tensor."""
    return stored.read(stored.whole)


def unread(name: str, parts: Parts) -> CheckpointError:
    """The error for a matrix whose parts are in none of the forms that are read."""
    stored = ", ".join(f"{part} {one.dtype} {list(one.shape)}" for part, one in parts.items())
    return CheckpointError(f"{name} has quantised weights in a form that jdllm does not read: {stored}")


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """uint8 fields of so many bits of 32-bit words, the lowest first; they may lie across words of a row."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits == 0:
        found = np.empty((*data.shape, 8 // bits), np.uint8)
        for place in range(8 // bits):
            np.right_shift(data, place * bits, out=found[..., place])
        found &= (1 << bits) - 1
        return found.reshape(len(words), -1)
    stream = np.unpackbits(data, axis=1, bitorder="little")
    whole = stream[:, : stream.shape[1] // bits * bits].reshape(len(words), -1, bits)
    return whole @ (1 << np.arange(bits, dtype=np.uint8))


def scaled(q: Any, scales: Any, zeros: Any) -> np.ndarray:
    """(q - zero) * scale, rounded to the type of the scales; no zeros where they are `None`.

    In float32 the difference of numbers of 8 bits is exact, and so is its product with a scale of 16 bits.
    NumPy takes many times as long for products in types of 16 bits.
    """
    values = q.astype(np.float32)
    if zeros is not None:
        values -= zeros.astype(np.float32)
    values *= scales.astype(np.float32)
    return values.astype(scales.dtype)


def numbers(
    form: WeightForm,
    values: StoredTensor,
    parts: Parts,
    scales: Decode,
    group: np.ndarray,
    offsets: Decode | None = None,
) -> tuple[Numbers, ...]:
    """What a device keeps of a matrix: one, or nothing where inputs that share a scale in this form have
    different ones.

    Arguments:
    - `form`: of the matrix.
    - `values`: of `Numbers`.
    - `parts`: what is stored of the matrix.
    - `scales`: returns the stored scales of some rows, side by side.
    - `group`: which of the scales of a row each of its inputs has.
    - `offsets`: of "uint4", the same of what the number 0 stands for. That is 0 if `None`.
    """
    size = KINDS[form].group or max(1, len(group))
    chosen = group[::size]
    if (np.repeat(chosen, size)[: len(group)] != group).any() or (form == "uint4" and len(group) % size):
        return ()

    def tensor(decode: Decode) -> PackedTensor:
        def of_rows(parts: Parts, rows: range) -> np.ndarray:
            found = decode(parts, rows)[:, chosen].astype(DTYPES[dtype])
            return found[:, 0] if KINDS[form].group is None else found

        shape = values.shape[0], len(chosen)
        return PackedTensor.of(parts, dtype, shape[:1] if KINDS[form].group is None else shape, of_rows)

    def without_offsets(parts: Parts, rows: range) -> np.ndarray:
        return np.zeros_like(scales(parts, rows))

    if form != "uint4":
        dtype = "F32"
        return (Numbers(form, values, (tensor(scales),)),)
    dtype = "BF16"
    return (Numbers(form, values, (tensor(scales), tensor(offsets or without_offsets))),)


def in_equal_groups(inputs: int, groups: int) -> np.ndarray:
    """Which of so many groups of neighbours each input is in."""
    return np.arange(inputs) // (inputs // groups)
