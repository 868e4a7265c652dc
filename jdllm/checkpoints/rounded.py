"""Matrices that a native checkpoint stores in 8 bits: while they are written, and while they are read."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jdllm.checkpoints.index import DTYPES, Index, StoredTensor
from jdllm.errors import CheckpointError
from jdllm.quantised import rounded

VALUES, SCALES = "I8", "F32"
"""Types of the numbers of a matrix and of the scales of its rows, in the words of a safetensors header."""

SCALES_SUFFIX = "_scale"
"""What the name of a tensor of scales has behind the name of its matrix."""

AT_ONCE = 1 << 20
"""Elements that are rounded at a time: 4 MiB in float32."""

_rounded = jax.jit(rounded)


@dataclasses.dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A matrix in 8 bits: row `o` is `values[o] * scales[o]`, whose inputs are in their natural order.

    `dtype` is the type of rows that are read, `file` and `offset` are those of the values.
    """

    values: StoredTensor
    scales: StoredTensor

    @property
    def bytes(self) -> int:
        return self.values.bytes + self.scales.bytes

    def rows(self, first: int, count: int) -> "QuantisedTensor":
        values, scales = self.values.rows(first, count), self.scales.rows(first, count)
        return dataclasses.replace(
            self, shape=values.shape, offset=values.offset, values=values, scales=scales
        )

    def read(self, part: Sequence[range]) -> np.ndarray:
        values = self.values.read(part).astype(np.float32)
        values *= self.scales.read(part[:1])[:, None]
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[self.dtype])


@dataclasses.dataclass(frozen=True)
class RoundedTensor(StoredTensor):
    """The numbers of a rounded matrix, or the scales of its rows: the default device rounds rows as they are
    read. `file` and `offset` are those of `matrix`, `dtype` says which of the two it is."""

    matrix: StoredTensor

    def read(self, part: Sequence[range]) -> np.ndarray:
        rows, *_ = part
        (columns,) = self.matrix.whole[1:]
        step, found = max(1, AT_ONCE // len(columns)), []
        for first in range(rows.start, rows.stop, step):
            some = range(first, min(first + step, rows.stop))
            values, scales = _rounded(self.matrix.read([some, columns]))
            found.append(np.asarray(values if self.dtype == VALUES else scales))
        return np.concatenate(found)


def rounding(index: Index, names: Iterable[str]) -> Index:
    """What is stored of the matrices of these names: two tensors of each."""
    found: Index = {}
    for name in names:
        matrix = index[name]
        file, offset, shape = matrix.file, matrix.offset, matrix.shape
        found[name] = RoundedTensor(file, VALUES, shape, offset, matrix)
        found[name + SCALES_SUFFIX] = RoundedTensor(file, SCALES, shape[:1], offset, matrix)
    return found


def matrices(index: Index, dtype: str) -> Index:
    """The tensors of a checkpoint with one tensor for each matrix in 8 bits.

    Arguments:
    - `index`: what is stored.
    - `dtype`: of the matrices that are read, in the words of a safetensors header.

    Raises `CheckpointError` for a matrix without a scale for each row.
    """
    found = dict(index)
    for name, values in index.items():
        if values.dtype != VALUES:
            continue
        scales = found.pop(name + SCALES_SUFFIX, None)
        fits = scales is not None and (scales.dtype, scales.shape) == (SCALES, values.shape[:1])
        if scales is None or not fits or len(values.shape) != 2:
            told = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise CheckpointError(
                f"{values.file} ({name}) is {VALUES} {list(values.shape)} and its scales are {told}: expected"
                f" a matrix, and {SCALES} for each row"
            )
        found[name] = QuantisedTensor(values.file, dtype, values.shape, values.offset, values, scales)
    return found
