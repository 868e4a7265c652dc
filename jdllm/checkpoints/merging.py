"""A LoRA adapter of PEFT that is merged into the matrices of a checkpoint as they are read.

A merged matrix is W + scale * B A. The product and the sum are in float32, and the sum is rounded to the type
of W. PEFT's `merge_and_unload` has the same order of operations. Terms of the product are added in float64:
in float32 their order, which depends on the part that is read and on the processor, would change a last bit.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jdllm.checkpoints.index import DTYPES, Index, StoredTensor
from jdllm.checkpoints.lora import LoraSettings, read_lora
from jdllm.checkpoints.peft import CONFIG, WEIGHTS, check_tensors, read_tensors
from jdllm.errors import CheckpointError
from jdllm.models.config import ModelConfig
from jdllm.models.registry import FAMILIES

_PREFIX = "base_model.model."
_AT_ONCE = 1 << 18
"""Elements that are merged at a time: they stay in the caches of a core."""


class Product(NamedTuple):
    """scale * B A, or the transpose of that.

    - `a`: [rank, inputs].
    - `b`: [outputs, rank].
    - `transposed`: the product is for an embedding, whose rows are the inputs.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    transposed: bool

    def factors(self, rows: range, columns: range) -> tuple[np.ndarray, np.ndarray]:
        """[rows, rank] and [rank, columns], in float64, whose product times the scale is a part of it."""
        inputs, outputs = (rows, columns) if self.transposed else (columns, rows)
        a = self.a.read([self.a.whole[0], inputs]).astype(np.float64)
        b = self.b.read([outputs, self.b.whole[1]]).astype(np.float64)
        return (a.T, b.T) if self.transposed else (b, a)


@dataclasses.dataclass(frozen=True)
class MergedTensor(StoredTensor):
    """A matrix with a product added. `file`, `dtype` and `offset` are those of the matrix without.

    - `base`: this matrix.
    - `product`: what is added.
    - `first_row`: of the product.
    """

    base: StoredTensor
    product: Product
    first_row: int = 0

    def rows(self, first: int, count: int) -> "MergedTensor":
        base = self.base.rows(first, count)
        return dataclasses.replace(
            self, shape=base.shape, offset=base.offset, base=base, first_row=self.first_row + first
        )

    def read(self, part: Sequence[range]) -> np.ndarray:
        rows, columns = part
        base, values = self.base.read(part), np.empty((len(rows), len(columns)), DTYPES[self.dtype])
        shifted = range(self.first_row + rows.start, self.first_row + rows.stop)
        left, right = self.product.factors(shifted, columns)
        scale, step = np.float32(self.product.scale), max(1, _AT_ONCE // len(columns))
        for first in range(0, len(rows), step):
            some = slice(first, first + step)
            with np.errstate(over="ignore"):
                product = (left[some] @ right).astype(np.float32)
                values[some] = base[some].astype(np.float32) + product * scale
        return values


@dataclasses.dataclass(frozen=True)
class ReplacedTensor(StoredTensor):
    """A tensor that an adapter has anew. `file`, `dtype` and `offset` are those of the old one.

    - `by`: the new one, which may have another type.
    """

    by: StoredTensor

    def rows(self, first: int, count: int) -> "ReplacedTensor":
        old = super().rows(first, count)
        return dataclasses.replace(self, shape=old.shape, offset=old.offset, by=self.by.rows(first, count))

    def read(self, part: Sequence[range]) -> np.ndarray:
        with np.errstate(over="ignore"):
            return self.by.read(part).astype(DTYPES[self.dtype])


def merged(index: Index, directory: Path, config: ModelConfig) -> Index:
    """The tensors of a checkpoint with an adapter.

    Arguments:
    - `index`: of the checkpoint.
    - `directory`: of the adapter, in the format of PEFT.
    - `config`: the model.

    Raises `CheckpointError` for a directory without an adapter, settings that are not followed, tensors that
    are missing, unknown, of another shape or of a type that cannot be loaded, an adapter that changes no
    matrix, and one that changes a head or an embedding that are tied.
    """
    settings, file = read_lora(directory), directory / WEIGHTS
    tensors = {_plain(name): stored for name, stored in read_tensors(directory).items()}
    _refuse_tied(file, tensors, config)
    targets, new = _targets(settings, index, tensors, config), _new(settings, index, tensors)
    if not targets and not new:
        raise CheckpointError(
            f"{directory / CONFIG}: target_modules is {settings.wanted!r}, and the model has no such matrix"
        )
    expected = {name: index[old].shape for old, name in new.items()}
    for name, target in targets.items():
        expected |= target.shapes(index[name].shape)
    check_tensors(file, tensors, expected)
    found = dict(index)
    for old, name in new.items():
        was = index[old]
        found[old] = ReplacedTensor(was.file, was.dtype, was.shape, was.offset, tensors[name])
    for name, target in targets.items():
        base = found[name]
        product = Product(tensors[target.a], tensors[target.b], target.scale, target.embedding)
        found[name] = MergedTensor(base.file, base.dtype, base.shape, base.offset, base, product)
    return found


class _Target(NamedTuple):
    """A matrix to which an adapter adds a product."""

    module: str
    rank: int
    scale: float
    embedding: bool

    @property
    def a(self) -> str:
        return f"{_PREFIX}{self.module}.lora_{'embedding_A' if self.embedding else 'A.weight'}"

    @property
    def b(self) -> str:
        return f"{_PREFIX}{self.module}.lora_{'embedding_B' if self.embedding else 'B.weight'}"

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
        """Of the two matrices of a product for a matrix of this shape."""
        outputs, inputs = shape[::-1] if self.embedding else shape
        return {self.a: (self.rank, inputs), self.b: (outputs, self.rank)}


def _plain(name: str) -> str:
    """A name without that of the adapter, which some files have."""
    return re.sub(r"(\.lora_(?:embedding_)?[AB])\.default(?=\.weight$|$)", r"\1", name)


def _refuse_tied(file: Path, tensors: Index, config: ModelConfig) -> None:
    names = FAMILIES[config.family].tensor_names
    tied = tuple(_PREFIX + names[leaf].removesuffix("weight") for leaf in ("embed", "head"))
    changed = [name for name in tensors if name.startswith(tied)]
    if config.tied_head and changed:
        raise CheckpointError(
            f"{file} has {changed[0]}, and config.json ties the head to the embedding: such an"
            " adapter needs a checkpoint that has both"
        )


def _new(settings: LoraSettings, index: Index, tensors: Index) -> dict[str, str]:
    """Names of the tensors that an adapter has anew, and what they are called in its file."""
    found = {name: _PREFIX + name for name in index if settings.has_anew(name)}
    for name in tensors:
        old = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if name.startswith(_PREFIX) and old in index:
            found[old] = name
    return found


def _targets(settings: LoraSettings, index: Index, tensors: Index, config: ModelConfig) -> dict[str, _Target]:
    """The matrices to which an adapter adds products, by their names."""
    names, found = FAMILIES[config.family].tensor_names, {}
    for name, stored in index.items():
        module = name.removesuffix(".weight")
        product = settings.product(module) if module != name and len(stored.shape) == 2 else None
        if product is None:
            continue
        target = _Target(module, *product, name == names["embed"])
        # Which matrices are linear layers the tensors tell: a router may be none.
        if not settings.all_linear or target.a in tensors:
            found[name] = target
    return found
