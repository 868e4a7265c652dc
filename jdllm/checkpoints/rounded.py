"""Matrices that a native checkpoint stores in few bits: while they are written, and while they are read."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jdllm.checkpoints.index import DTYPES, READABLE, Index, Numbers, StoredTensor
from jdllm.checkpoints.quantised.packed import fields
from jdllm.errors import CheckpointError
from jdllm.quantised import GROUP, KINDS, WeightForm

VALUES: dict[WeightForm, str] = {"int8": "I8", "int4": "U8", "fp8": "F8_E4M3"}
"""Types of the numbers of a matrix in the words of a safetensors header. Two of 4 bits are one of 8."""

SCALES = "F32"
"""Type of the scales of a matrix."""

_FORMS: dict[str, WeightForm] = {dtype: form for form, dtype in VALUES.items()}

SCALES_SUFFIX = "_scale"
"""What the name of a tensor of scales has behind the name of its matrix."""

AT_ONCE = 1 << 18
"""Elements that are rounded at a time: 1 MiB in float32."""

_stored = {form: jax.jit(kind.stored) for form, kind in KINDS.items()}


@dataclasses.dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A matrix in few bits, as `jdllm.quantised` has them stored.

    `dtype` is the type of rows that are read, `file` and `offset` are those of the values.
    """

    values: StoredTensor
    scales: StoredTensor

    @property
    def form(self) -> WeightForm:
        return _FORMS[self.values.dtype]

    @property
    def numbers(self) -> Numbers:
        return Numbers(self.form, self.values, self.scales)

    @property
    def bytes(self) -> int:
        return self.values.bytes + self.scales.bytes

    def rows(self, first: int, count: int) -> "QuantisedTensor":
        values, scales = self.values.rows(first, count), self.scales.rows(first, count)
        shape = count, *self.shape[1:]
        return dataclasses.replace(self, shape=shape, offset=values.offset, values=values, scales=scales)

    def read(self, part: Sequence[range]) -> np.ndarray:
        rows, columns = part
        if self.form != "int4":
            values = self.values.read(part).astype(np.float32)
            values *= self.scales.read([rows])[:, None]
        else:
            pairs = self.values.read([rows, *self.values.whole[1:]])
            values = fields(pairs, 4).astype(np.float32) - 8
            scales = self.scales.read([rows, *self.scales.whole[1:]]).repeat(GROUP, axis=1)
            values = (values * scales[:, : values.shape[1]])[:, columns.start : columns.stop]
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[self.dtype])


@dataclasses.dataclass(frozen=True)
class RoundedTensor(StoredTensor):
    """The numbers of a rounded matrix, or its scales: the default device rounds rows as they are read. A
    matrix that is stored in numbers of this form keeps them. `file` and `offset` are those of `matrix`,
    `dtype` says which of the two it is."""

    matrix: StoredTensor
    form: WeightForm

    def read(self, part: Sequence[range]) -> np.ndarray:
        rows, *_ = part
        numbers = self.matrix.numbers
        if numbers is not None and numbers.form == self.form:
            own = numbers.scales if self.dtype == SCALES else numbers.values
            whole = np.ascontiguousarray(own.read([rows, *own.whole[1:]]))
            return whole.view(READABLE[self.dtype]).reshape(len(rows), *self.shape[1:])
        (columns,) = self.matrix.whole[1:]
        step, found = max(1, AT_ONCE // len(columns)), []
        for first in range(rows.start, rows.stop, step):
            some = range(first, min(first + step, rows.stop))
            values, scales = _stored[self.form](self.matrix.read([some, columns]))
            found.append(np.asarray(scales if self.dtype == SCALES else values))
        return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class HeldTensor(StoredTensor):
    """Values in memory, `held`, made from a tensor of `file`."""

    held: np.ndarray

    def read(self, part: Sequence[range]) -> np.ndarray:
        return self.held[tuple(slice(axis.start, axis.stop) for axis in part)]


def stored_shapes(shape: tuple[int, ...], form: WeightForm) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of what files have of a matrix, or of matrices of many layers: of numbers and of scales."""
    *rows, inputs = shape
    if form != "int4":
        return shape, tuple(rows)
    return (*rows, inputs // 2), (*rows, -(-inputs // GROUP))


def matrix_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix whose numbers are stored so."""
    return (*shape[:-1], 2 * shape[-1]) if dtype == VALUES["int4"] else shape


def rounding(index: Index, names: Iterable[str], form: WeightForm) -> Index:
    """What is stored of the matrices of these names: two tensors of each."""
    found: Index = {}
    for name in names:
        matrix = index[name]
        file, offset, (values, scales) = matrix.file, matrix.offset, stored_shapes(matrix.shape, form)
        found[name] = RoundedTensor(file, VALUES[form], values, offset, matrix, form)
        found[name + SCALES_SUFFIX] = RoundedTensor(file, SCALES, scales, offset, matrix, form)
    return found


def matrices(index: Index, dtype: str) -> Index:
    """The tensors of a checkpoint with one tensor for each matrix in few bits.

    Arguments:
    - `index`: what is stored.
    - `dtype`: of the matrices that are read, in the words of a safetensors header.

    Raises `CheckpointError` for a matrix without the scales of its form.
    """
    found = dict(index)
    for name, values in index.items():
        if values.dtype not in _FORMS:
            continue
        form, shape = _FORMS[values.dtype], matrix_shape(values.dtype, values.shape)
        scales, expected = found.pop(name + SCALES_SUFFIX, None), stored_shapes(shape, form)[1]
        fits = scales is not None and (scales.dtype, scales.shape) == (SCALES, expected)
        if scales is None or not fits or len(shape) != 2:
            told = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            each = "row" if form != "int4" else f"{GROUP} inputs of a row"
            raise CheckpointError(
                f"{values.file} ({name}) is {values.dtype} {list(values.shape)} and its scales are {told}:"
                f" expected a matrix, and {SCALES} for each {each}"
            )
        found[name] = QuantisedTensor(values.file, dtype, shape, values.offset, values, scales)
    return found
