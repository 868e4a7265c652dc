"""Matrices that a native checkpoint stores in few bits: while they are written, and while they are read."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jdllm.checkpoints.index import DTYPES, READABLE, Index, Numbers, StoredTensor
from jdllm.checkpoints.quantised.packed import fields
from jdllm.errors import CheckpointError
from jdllm.quantised import KINDS, WeightForm


class Part(NamedTuple):
    """One of the tensors that files have of a matrix.

    - `name`: of its array in a leaf.
    - `suffix`: what its name has behind the name of the matrix.
    - `dtype`: its type in the words of a safetensors header. Two numbers of 4 bits are one of 8.
    """

    name: str
    suffix: str
    dtype: str


def _parts(values: str, scales: str = "F32", offsets: str | None = None) -> tuple[Part, ...]:
    found = Part("values", "", values), Part("scales", "_scale", scales)
    return found if offsets is None else (*found, Part("offsets", "_offset", offsets))


PARTS: dict[WeightForm, tuple[Part, ...]] = {
    "int8": _parts("I8"),
    "int4": _parts("U8"),
    "uint4": _parts("U8", "BF16", "BF16"),
    "fp8": _parts("F8_E4M3"),
}
"""What files have of a matrix in each form: numbers first."""

VALUES = frozenset(parts[0].dtype for parts in PARTS.values())
"""Types of the numbers of a matrix."""

_FORMS: dict[tuple[str, int], WeightForm] = {
    (parts[0].dtype, len(parts) - 1): form for form, parts in PARTS.items()
}
"""By the type of the numbers, and how many other parts there are."""

SUFFIXES = tuple(dict.fromkeys(part.suffix for parts in PARTS.values() for part in parts[1:]))
"""Of the names of all other parts."""

AT_ONCE = 1 << 18
"""Elements that are rounded at a time: 1 MiB in float32."""

_stored = {form: jax.jit(kind.stored) for form, kind in KINDS.items()}


@dataclasses.dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A matrix in few bits, as `jdllm.quantised` has them stored.

    `dtype` is the type of rows that are read, `file` and `offset` are those of the values.
    """

    kept: Numbers

    def numbers_in(self, form: WeightForm) -> Numbers | None:
        return self.kept if self.kept.form == form else None

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.kept.parts)

    def rows(self, first: int, count: int) -> "QuantisedTensor":
        kept = self.kept.rows(first, count)
        shape = count, *self.shape[1:]
        return dataclasses.replace(self, shape=shape, offset=kept.values.offset, kept=kept)

    def read(self, part: Sequence[range]) -> np.ndarray:
        rows, columns = part
        stored, group = self.kept.values, KINDS[self.kept.form].group
        if group is None:
            values = stored.read(part).astype(np.float32)
            [scales] = (other.read([rows]) for other in self.kept.others)
            values *= scales[:, None]
        else:
            values = fields(stored.read([rows, *stored.whole[1:]]), 4).astype(np.float32) - 8
            scales, *offsets = (
                other.read([rows, *other.whole[1:]]).astype(np.float32).repeat(group, axis=1)
                for other in self.kept.others
            )
            values *= scales[:, : values.shape[1]]
            for each in offsets:
                values += each
            values = values[:, columns.start : columns.stop]
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[self.dtype])


@dataclasses.dataclass(frozen=True)
class RoundedTensor(StoredTensor):
    """One part of a rounded matrix: the default device rounds rows as they are read. A matrix that is stored
    in numbers of this form keeps them. `file` and `offset` are those of `matrix`.

    - `matrix`, `form`: the matrix, and the form that it is rounded to.
    - `place`: of the part among the `PARTS` of the form.
    """

    matrix: StoredTensor
    form: WeightForm
    place: int

    def read(self, part: Sequence[range]) -> np.ndarray:
        rows, *_ = part
        numbers = self.matrix.numbers_in(self.form)
        if numbers is not None:
            own = numbers.parts[self.place]
            whole = np.ascontiguousarray(own.read([rows, *own.whole[1:]]))
            return whole.view(READABLE[self.dtype]).reshape(len(rows), *self.shape[1:])
        (columns,) = self.matrix.whole[1:]
        step, found = max(1, AT_ONCE // len(columns)), []
        for first in range(rows.start, rows.stop, step):
            some = range(first, min(first + step, rows.stop))
            found.append(np.asarray(_stored[self.form](self.matrix.read([some, columns]))[self.place]))
        return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class HeldTensor(StoredTensor):
    """Values in memory, `held`, made from a tensor of `file`."""

    held: np.ndarray

    def read(self, part: Sequence[range]) -> np.ndarray:
        return self.held[tuple(slice(axis.start, axis.stop) for axis in part)]


def stored_shapes(shape: tuple[int, ...], form: WeightForm) -> tuple[tuple[int, ...], ...]:
    """Shapes of what files have of a matrix, or of matrices of many layers, by the `PARTS` of its form."""
    (*rows, inputs), group = shape, KINDS[form].group
    if group is None:
        return shape, tuple(rows)
    return (*rows, inputs // 2), *((*rows, -(-inputs // group)) for _ in PARTS[form][1:])


def matrix_of(name: str) -> str:
    """The name of the matrix that a tensor of this name is a part of."""
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def matrix_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix whose numbers are stored so."""
    return (*shape[:-1], 2 * shape[-1]) if dtype == PARTS["int4"][0].dtype else shape


def rounding(index: Index, names: Iterable[str], form: WeightForm) -> Index:
    """What is stored of the matrices of these names: a tensor for each part of the form."""
    found: Index = {}
    for name in names:
        matrix = index[name]
        parts = zip(PARTS[form], stored_shapes(matrix.shape, form), strict=True)
        for place, (part, shape) in enumerate(parts):
            found[name + part.suffix] = RoundedTensor(
                matrix.file, part.dtype, shape, matrix.offset, matrix, form, place
            )
    return found


def matrices(index: Index, dtype: str) -> Index:
    """The tensors of a checkpoint with one tensor for each matrix in few bits.

    Arguments:
    - `index`: what is stored.
    - `dtype`: of the matrices that are read, in the words of a safetensors header.

    Raises `CheckpointError` for a matrix without the scales and offsets of its form.
    """
    found = dict(index)
    for name, values in index.items():
        if values.dtype not in VALUES:
            continue
        kept = _checked(name, values, {s: index[name + s] for s in SUFFIXES if name + s in index})
        for part in PARTS[kept.form][1:]:
            del found[name + part.suffix]
        shape = matrix_shape(values.dtype, values.shape)
        found[name] = QuantisedTensor(values.file, dtype, shape, values.offset, kept)
    return found


def _checked(name: str, values: StoredTensor, others: Mapping[str, StoredTensor]) -> Numbers:
    """A matrix of this name, whose other parts are given by their suffixes."""
    form = _FORMS.get((values.dtype, len(others)), _FORMS[values.dtype, 1])
    shape, group = matrix_shape(values.dtype, values.shape), KINDS[form].group
    parts = list(zip(PARTS[form], stored_shapes(shape, form), strict=True))[1:]
    for part, expected in parts:
        stored = others.get(part.suffix)
        if stored is None or (stored.dtype, stored.shape) != (part.dtype, expected) or len(shape) != 2:
            told = "none" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            each = "row" if group is None else f"{group} inputs of a row"
            raise CheckpointError(
                f"{values.file} ({name}) is {values.dtype} {list(values.shape)} and its {part.name} are"
                f" {told}: expected a matrix, and {part.dtype} for each {each}"
            )
    return Numbers(form, values, tuple(others[part.suffix] for part, _ in parts))
