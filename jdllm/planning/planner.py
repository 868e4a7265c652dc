"""Offsets of the tensors of a graph in one block of memory, and the plan that results."""

import dataclasses
from bisect import insort
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jdllm.planning.graph import Graph

# Of the search below: far above what is alive at once in a model, far below Python's recursion limit.
_DEEPEST = 150


class Layout(NamedTuple):
    """Where each tensor of a graph starts, in bytes, and the end of the highest one."""

    offsets: tuple[int, ...]
    peak: int


class PlannedTensor(NamedTuple):
    """One tensor of a plan.

    - `bytes`, `offset`: its place; both are multiples of 256.
    - `first`, `last`: the operators (inclusive) between which it is alive, indices into `ActivationPlan.ops`.
    - `cut_by`: the chunk counts that its size depends on.
    """

    name: str
    bytes: int
    first: int
    last: int
    offset: int
    cut_by: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ActivationPlan:
    """The transient memory of one step.

    - `peak_bytes`: what the tensors need together, placed.
    - `peak_op`: the operator during which most bytes are alive.
    - `average_bytes`: mean of the live bytes over the operators; `peak_to_average` is the peak over it.
    - `lower_bound`: the largest sum of live bytes, which no placement can undercut.
    - `counts`: the chunk count of each component.
    - `ops`: operator names, in order of execution.
    - `tensors`: every tensor with its place and lifetime.
    - `stop_reason`: "fits", or why no further chunk count helps.
    """

    peak_bytes: int
    peak_op: str
    average_bytes: float
    peak_to_average: float
    lower_bound: int
    counts: Mapping[str, int]
    ops: tuple[str, ...]
    tensors: tuple[PlannedTensor, ...]
    stop_reason: str

    @property
    def fits(self) -> bool:
        """Whether the plan keeps to the budget that it was made for."""
        return self.stop_reason == "fits"


def make_plan(graph: Graph, counts: Mapping[str, int], stop_reason: str, layout: Layout) -> ActivationPlan:
    """The plan of one instantiated graph.

    Arguments:
    - `graph`: sizes and lifetimes, instantiated with `counts`.
    - `counts`: the chunk count of each component.
    - `stop_reason`: as `ActivationPlan` states it.
    - `layout`: the place of each of the graph's tensors.
    """
    columns = (graph.tensors, graph.sizes.tolist(), graph.first, graph.last, layout.offsets, graph.cut_by)
    return ActivationPlan(
        peak_bytes=layout.peak,
        peak_op=graph.peak_op,
        average_bytes=graph.average,
        peak_to_average=layout.peak / graph.average if layout.peak else 1.0,
        lower_bound=graph.lower_bound,
        counts=dict(counts),
        ops=graph.ops,
        tensors=tuple(map(PlannedTensor, *columns)),
        stop_reason=stop_reason,
    )


def first_fit(graph: Graph) -> Layout:
    """Place the tensors one after another, each at the lowest offset that is free for its whole lifetime.

    The largest come first, ties by start. Where that misses the lower bound, a bounded search looks for an
    order that reaches it.

    Returns a layout in which no two tensors overlap that are alive together.
    """
    sizes = graph.sizes.tolist()
    layout = _place(graph, sizes, sorted(range(len(sizes)), key=lambda i: (-sizes[i], graph.first[i])))
    if layout.peak > graph.lower_bound:
        return _Stack(graph, sizes).solve() or layout
    return layout


def _place(graph: Graph, sizes: Sequence[int], order: Sequence[int]) -> Layout:
    first, last = graph.first, graph.last
    offsets = [0] * len(sizes)
    placed: list[tuple[int, int, int, int]] = []
    for i in order:
        start, end, size = first[i], last[i], sizes[i]
        offset = 0
        for low, high, begins, ends in placed:
            if begins <= end and start <= ends:
                if low - offset >= size:
                    break
                offset = max(offset, high)
        offsets[i] = offset
        insort(placed, (offset, offset + size, start, end))
    return Layout(tuple(offsets), max((high for _, high, _, _ in placed), default=0))


class _Stack:
    """Search for an order that needs no more than the lower bound, from the bottom up.

    Tensors are placed in rising order of offset on what already stands during their lifetime. A gap below a
    tensor can never be filled again, so each operator has only so many bytes to spare (the bound less what
    is alive during it), and a choice that wastes more is taken back. Of equal offsets, the tensor that meets
    the operator with least to spare comes first, then the longest lived, then the largest. Tensors that
    share no lifetime, not even through others that are left, are independent problems.
    """

    def __init__(self, graph: Graph, sizes: Sequence[int]):
        self.first, self.last, self.sizes = graph.first, graph.last, sizes
        self.offsets = [0] * len(sizes)
        self.height = [0] * len(graph.ops)
        self.spare = (graph.lower_bound - graph.live_bytes).tolist()
        self.tries = 5 * len(sizes)

    def solve(self) -> Layout | None:
        rest = [i for i in range(len(self.sizes)) if self.sizes[i]]
        rest.sort(key=lambda i: self.first[i])
        if not self._fill(rest, floor=0, depth=0):
            return None
        return Layout(tuple(self.offsets), max(self.height))

    def _fill(self, rest: Sequence[int], floor: int, depth: int) -> bool:
        """Place `rest` (by rising start), nothing below `floor`."""
        return all(self._fill_part(part, floor, depth) for part in self._parts(rest))

    def _fill_part(self, rest: Sequence[int], floor: int, depth: int) -> bool:
        for offset, *_, i in self._choices(rest, floor):
            span = slice(self.first[i], self.last[i] + 1)
            gaps = [offset - height for height in self.height[span]]
            spare = [spare - gap for spare, gap in zip(self.spare[span], gaps, strict=True)]
            if min(spare) < 0:
                continue
            self.tries -= 1
            if self.tries < 0 or depth > _DEEPEST:
                return False
            before = self.height[:], self.spare[:]
            self.height[span] = [offset + self.sizes[i]] * len(gaps)
            self.spare[span] = spare
            self.offsets[i] = offset
            if self._fill([j for j in rest if j != i], offset, depth + 1):
                return True
            self.height, self.spare = before
        return False

    def _choices(self, rest: Sequence[int], floor: int) -> list[tuple[int, int, int, int, int]]:
        """(offset, least to spare, -lifetime, -size, tensor) for each of `rest`, the first to try first."""
        choices = []
        for i in rest:
            start, end = self.first[i], self.last[i] + 1
            offset = max(floor, *self.height[start:end])
            choices.append((offset, min(self.spare[start:end]), start - end, -self.sizes[i], i))
        return sorted(choices)

    def _parts(self, rest: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = []
        end = -1
        for i in rest:
            if self.first[i] > end:
                parts.append([])
            parts[-1].append(i)
            end = max(end, self.last[i])
        return parts
