"""Graph templates: the tensors of one step with symbolic sizes and fixed lifetimes.

A template is built once per model from operators whose tensors have sizes over named dimensions (rows,
masked rows, chunk counts); `GraphTemplate.instantiate` puts numbers in. Source: the graph registrar of
Mosaic (global memory planning for diffusion language models).
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

ALIGNMENT = 256

Count = int | Int64[np.ndarray, " configs"]


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes or rows over named dimensions.

    Built from `dim("T")` and integers with `+`, `*`, `ceil_div`, `maximum` and `minimum`. Sizes of equal
    structure are equal.
    """

    kind: str
    args: tuple[Any, ...]

    def __add__(self, other: "Size | int") -> "Size":
        return _combine("+", self, other)

    def __mul__(self, other: "Size | int") -> "Size":
        return _combine("*", self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def dims(self) -> frozenset[str]:
        """Names of the dimensions that occur in it."""
        if self.kind in ("dim", "const"):
            return frozenset(self.args if self.kind == "dim" else ())
        return self.args[0].dims | self.args[1].dims

    def evaluate(self, dims: Mapping[str, int]) -> int:
        """Its value for one value of each dimension."""
        return _Tape([self]).run(dims)[0]


def dim(name: str) -> Size:
    """The size that a dimension of this name stands for."""
    return Size("dim", (name,))


def ceil_div(a: Size | int, b: Size | int) -> Size:
    """a / b, rounded up: rows of a chunk, `ceil_div(dim("T"), dim("ffn"))`."""
    return _combine("ceil_div", a, b)


def maximum(a: Size | int, b: Size | int) -> Size:
    """The larger of two sizes."""
    return _combine("max", a, b)


def minimum(a: Size | int, b: Size | int) -> Size:
    """The smaller of two sizes."""
    return _combine("min", a, b)


def _combine(kind: str, a: Size | int, b: Size | int) -> Size:
    return Size(kind, (_as_size(a), _as_size(b)))


def _as_size(value: Size | int) -> Size:
    return value if isinstance(value, Size) else Size("const", (operator.index(value),))


def _elementwise(scalar: Callable[..., Any], array: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: scalar(a, b) if type(a) is type(b) is int else array(a, b)


_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "ceil_div": lambda a, b: -(-a // b),
    "max": _elementwise(max, np.maximum),
    "min": _elementwise(min, np.minimum),
}


class _Tape:
    """Several sizes as one list of instructions, each common part evaluated once."""

    def __init__(self, sizes: Sequence[Size]):
        nodes: dict[Size, None] = {}
        for size in sizes:
            _collect(size, nodes)
        constants = [node for node in nodes if node.kind == "const"]
        named = [node for node in nodes if node.kind == "dim"]
        inner = [node for node in nodes if node.kind not in ("const", "dim")]
        slot = {node: i for i, node in enumerate(constants + named + inner)}
        self._constants = [node.args[0] for node in constants]
        self._names = [node.args[0] for node in named]
        self._code = [(_FUNCTIONS[node.kind], slot[node.args[0]], slot[node.args[1]]) for node in inner]
        self._results = [slot[size] for size in sizes]

    def run(self, dims: Mapping[str, Any]) -> list[Any]:
        try:
            values = self._constants + [dims[name] for name in self._names]
        except KeyError as error:
            raise ValueError(f"no value for dimension {error}, got {sorted(dims)}") from None
        append = values.append
        for function, a, b in self._code:
            append(function(values[a], values[b]))
        return [values[i] for i in self._results]


def _collect(size: Size, nodes: dict[Size, None]) -> None:
    """Add `size` to `nodes`, after the parts that it is built from."""
    if size not in nodes:
        if size.kind not in ("const", "dim"):
            for part in size.args:
                _collect(part, nodes)
        nodes[size] = None


@dataclasses.dataclass(frozen=True)
class Graph:
    """A template with numbers put in.

    - `ops`: name of each operator, in order of execution.
    - `tensors`: name of each stored tensor; `sizes` their bytes, multiples of 256.
    - `first`, `last`: the operators (inclusive) between which each tensor is alive.
    - `cut_by`: the chunk counts that each tensor's size depends on.
    - `live_bytes`: int64 `[ops]`, sum of the sizes of the tensors alive during each operator.
    """

    ops: tuple[str, ...]
    tensors: tuple[str, ...]
    sizes: Int64[np.ndarray, " tensors"]
    first: tuple[int, ...]
    last: tuple[int, ...]
    cut_by: tuple[tuple[str, ...], ...]
    live_bytes: Int64[np.ndarray, " ops"]

    @functools.cached_property
    def lower_bound(self) -> int:
        """The largest live sum: no placement of the tensors needs less."""
        return int(self.live_bytes.max())

    @property
    def peak_op(self) -> str:
        """The first operator with the largest live sum."""
        return self.ops[int(self.live_bytes.argmax())]

    @property
    def average(self) -> float:
        """Mean of the live bytes over the operators."""
        return float(self.live_bytes.mean())


@dataclasses.dataclass
class _Tensor:
    name: str
    size: Size
    first: int
    last: int
    keep: bool = False


class _Compiled(NamedTuple):
    """What instantiation needs of a finished template; tensors of equal size share a column."""

    tape: _Tape
    column: Int64[np.ndarray, " tensors"]
    alive: Int64[np.ndarray, "ops columns"]
    dims: tuple[frozenset[str], ...]
    tensors: tuple[str, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    cut_by: tuple[tuple[str, ...], ...]


class GraphTemplate:
    """The operators of one step in order of execution, and the tensors that they keep.

    A tensor is alive from the operator that writes it to the last that reads it, both inclusive. A loop
    over chunks is described by one iteration, whose tensors have the size of a chunk, and a barrier after
    it for what every iteration reads.
    """

    def __init__(self, name: str):
        self.name = name
        self.ops: list[str] = []
        self.owners: list[tuple[str, ...]] = []
        self._tensors: dict[str, _Tensor] = {}
        self._compiled: _Compiled | None = None

    def add_input(self, tensor: str, size: Size | int, *, keep: bool = False) -> None:
        """A tensor that is alive from the first operator on, with `keep` to the last."""
        self._define(tensor, _Tensor(tensor, _as_size(size), 0, 0, keep))

    def add_op(
        self,
        name: str,
        inputs: Iterable[str] = (),
        outputs: Mapping[str, Size | int] | None = None,
        scratch: Size | int = 0,
        owners: Sequence[str] = (),
    ) -> None:
        """An operator.

        Arguments:
        - `inputs`: tensors that it reads: they are alive until it has run.
        - `outputs`: bytes of each tensor that it writes. Results of the whole graph need a reader, such as
          a barrier at its end.
        - `scratch`: bytes that it needs while it runs, beside inputs and outputs.
        - `owners`: the components whose counts lower what is alive during it, in rising order of what a
          count costs in latency. Empty where no count does.

        Raises `ValueError` for a name that is taken or an input that nothing wrote.
        """
        if name in self.ops:
            raise ValueError(f"{self.name}: operator {name!r} exists already")
        index = len(self.ops)
        for tensor in inputs:
            self._tensor(tensor).last = index
        written = dict(outputs or {})
        if scratch != 0:
            written[f"{name}.scratch"] = scratch
        for tensor, size in written.items():
            self._define(tensor, _Tensor(tensor, _as_size(size), index, index))
        self.ops.append(name)
        self.owners.append(tuple(owners))
        self._compiled = None

    def add_barrier(self, name: str, inputs: Iterable[str]) -> None:
        """Keep `inputs` alive to here, such as what a loop reads until its last chunk."""
        self.add_op(name, inputs)

    def instantiate(self, dims: Mapping[str, int]) -> Graph:
        """The graph for one value of each dimension; `ValueError` names a missing one."""
        parts = self._compile()
        sizes = _aligned(np.array(parts.tape.run(dims), np.int64))
        return Graph(
            ops=tuple(self.ops),
            tensors=parts.tensors,
            sizes=sizes[parts.column],
            first=parts.first,
            last=parts.last,
            cut_by=parts.cut_by,
            live_bytes=parts.alive @ sizes,
        )

    def live_bytes(self, dims: Mapping[str, Count]) -> Int64[np.ndarray, "ops *configs"]:
        """Live bytes per operator, without the rest of the graph.

        Arguments:
        - `dims`: a value of each dimension; some may be int64 arrays `[configs]`, to try several at once.

        Returns int64 `[ops]`, or `[ops, configs]` where a value is an array.
        """
        parts = self._compile()
        sizes = parts.tape.run(dims)
        configs = [value.shape for value in dims.values() if isinstance(value, np.ndarray)]
        if configs:
            table = np.empty((len(sizes), *configs[0]), np.int64)
            for row, size in enumerate(sizes):
                table[row] = size
        else:
            table = np.array(sizes, np.int64)
        return parts.alive @ _aligned(table)

    def dims_of(self, op: int) -> frozenset[str]:
        """The dimensions on which the live bytes of the operator with this index depend."""
        return self._compile().dims[op]

    def _define(self, name: str, tensor: _Tensor) -> None:
        if name in self._tensors:
            raise ValueError(f"{self.name}: tensor {name!r} exists already")
        self._tensors[name] = tensor
        self._compiled = None

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self.name}: nothing before this wrote tensor {name!r}")
        return self._tensors[name]

    def _compile(self) -> _Compiled:
        if self._compiled is None:
            if not self.ops:
                raise ValueError(f"{self.name}: a template needs at least one operator")
            self._compiled = _compile(list(self._tensors.values()), self.owners)
        return self._compiled


def _compile(tensors: Sequence[_Tensor], owners: Sequence[tuple[str, ...]]) -> _Compiled:
    last = tuple(len(owners) - 1 if tensor.keep else tensor.last for tensor in tensors)
    column_of: dict[Size, int] = {}
    column = np.array([column_of.setdefault(t.size, len(column_of)) for t in tensors], np.int64)
    alive = np.zeros((len(owners), len(column_of)), np.int64)
    dims: list[frozenset[str]] = [frozenset()] * len(owners)
    for tensor, end, c in zip(tensors, last, column, strict=True):
        for op in range(tensor.first, end + 1):
            alive[op, c] += 1
            dims[op] |= tensor.size.dims
    counts = dict.fromkeys(owner for op in owners for owner in op)
    return _Compiled(
        tape=_Tape(list(column_of)),
        column=column,
        alive=alive,
        dims=tuple(dims),
        tensors=tuple(tensor.name for tensor in tensors),
        first=tuple(tensor.first for tensor in tensors),
        last=last,
        cut_by=tuple(tuple(c for c in counts if c in tensor.size.dims) for tensor in tensors),
    )


def _aligned(sizes: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
    return (sizes + (ALIGNMENT - 1)) & -ALIGNMENT
