"""Lazy chunking: the smallest chunk counts, found bottleneck by bottleneck, whose plan fits a budget.

Every count starts at the first value of its ladder. While the peak exceeds the budget, one component that
causes it is raised by one step. Source: the search of Mosaic (dynamic peak taming).
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jdllm.planning.graph import GraphTemplate
from jdllm.planning.planner import ActivationPlan, first_fit, make_plan

Ladders = Mapping[str, Sequence[int]]


def search(template: GraphTemplate, dims: Mapping[str, int], ladders: Ladders, budget: int) -> ActivationPlan:
    """Raise chunk counts one step at a time until the plan fits.

    Each step looks at the operator with the most live bytes and raises one of its owners: the first (the
    cheapest in latency) that could bring it into the budget alone, at the end of its ladder; where none
    could, the last that still lowers it. The end of the ladder decides and not the next value, because a
    step may cost memory before it saves some.

    Arguments:
    - `template`: the graph; the count of a component is its dimension of that name.
    - `dims`: the value of every other dimension.
    - `ladders`: the counts that each component may take, in rising order.
    - `budget`: bytes that the plan may use.

    Returns the plan. Its `stop_reason` is "fits", or names the operator that no count lowers any further.
    Raises `ValueError` for a ladder that is empty or does not rise.
    """
    state = _Search(template, dims, ladders)
    limit = budget
    while True:
        stuck = state.raise_until(limit)
        graph = template.instantiate(state.dims)
        layout = first_fit(graph)
        if layout.peak <= budget or stuck:
            reason = "fits" if layout.peak <= budget else stuck
            return make_plan(graph, state.counts, reason, layout)
        limit = graph.lower_bound - 1


class _Search:
    """The counts so far, and the rule that raises them."""

    def __init__(self, template: GraphTemplate, dims: Mapping[str, int], ladders: Ladders):
        for component, ladder in ladders.items():
            if not ladder or list(ladder) != sorted(set(ladder)):
                raise ValueError(f"the ladder of {component!r} is not a rising list of counts: {ladder}")
        self.template = template
        self.ladders = ladders
        self._reached: dict[tuple[int | str | None, ...], int] = {}
        self.level = dict.fromkeys(ladders, 0)
        self.dims = {**dims, **{component: ladder[0] for component, ladder in ladders.items()}}

    @property
    def counts(self) -> dict[str, int]:
        return {component: self.dims[component] for component in self.ladders}

    def raise_until(self, limit: int) -> str:
        """Raise counts until no operator has more than `limit` bytes alive; "" or why that cannot be."""
        last, repeats = None, 0
        while True:
            live = self.template.live_bytes(self.dims)
            op = int(live.argmax())
            now = int(live[op])
            if now <= limit:
                return ""
            owner = self._owner(op, now, limit)
            if owner is None:
                name = self.template.ops[op]
                return f"{name}: no chunk count lowers its {now} bytes any further"
            repeats = repeats + 1 if (op, owner) == last else 0
            last = op, owner
            # Peaks often take turns, with a few steps each; only a longer run is worth looking ahead.
            ahead = self._run(op, now, owner, limit, window=4**repeats) if repeats >= 3 else 0
            self._raise(owner, 1 + ahead)

    def _raise(self, owner: str, steps: int) -> None:
        self.level[owner] += steps
        self.dims[owner] = self.ladders[owner][self.level[owner]]

    def _reach(self, op: int, owner: str) -> int:
        """Bytes alive during an operator with `owner` at the end of its ladder and the rest as it is."""
        others = (self.level.get(name) for name in self.template.dims_of(op) if name != owner)
        key = (op, owner, *others)
        if key not in self._reached:
            live = self.template.live_bytes({**self.dims, owner: self.ladders[owner][-1]})
            self._reached[key] = int(live[op])
        return self._reached[key]

    def _raisable(self, op: int) -> list[str]:
        return [
            owner
            for owner in self.template.owners[op]
            if owner in self.ladders and self.level[owner] + 1 < len(self.ladders[owner])
        ]

    def _owner(self, op: int, now: int, limit: int) -> str | None:
        costliest = None
        for owner in self._raisable(op):
            reach = self._reach(op, owner)
            if reach <= limit:
                return owner
            if reach < now:
                costliest = owner
        return costliest

    def _run(self, op: int, now: int, owner: str, limit: int, window: int) -> int:
        """For how many of the next `window` counts of `owner` the rule would choose the same again.

        The choice depends on the peak operator and, for each of its owners, on whether it alone could bring
        the operator into the limit, and whether it lowers it: as long as none of these change, nor does it.
        """
        level = self.level[owner]
        counts = np.array(self.ladders[owner][level + 1 : level + 1 + window], np.int64)
        ahead = {**self.dims, owner: counts}
        live = self.template.live_bytes(ahead)
        same = (live.argmax(axis=0) == op) & (live[op] > limit)
        for rival in self._raisable(op):
            before = self._reach(op, rival)
            after = self.template.live_bytes({**ahead, rival: self.ladders[rival][-1]})[op]
            same &= ((after <= limit) == (before <= limit)) & ((after < live[op]) == (before < now))
        return len(same) if same.all() else int(same.argmin())


def brute_force(
    template: GraphTemplate, dims: Mapping[str, int], ladders: Ladders, budget: int
) -> ActivationPlan | None:
    """The plan that fits with the fewest steps on its ladders in all, by trying every combination.

    For comparison with `search`, whose arguments it takes; ties go to the first combination. Returns None
    where nothing fits.
    """
    levels = itertools.product(*(range(len(ladder)) for ladder in ladders.values()))
    for level in sorted(levels, key=sum):
        counts = {name: ladder[i] for (name, ladder), i in zip(ladders.items(), level, strict=True)}
        graph = template.instantiate({**dims, **counts})
        if graph.lower_bound <= budget and (layout := first_fit(graph)).peak <= budget:
            return make_plan(graph, counts, "fits", layout)
    return None


def largest(fits: Callable[[int], bool], values: Sequence[int]) -> int | None:
    """The largest of some rising values for which `fits` holds, by bisection.

    Arguments:
    - `fits`: holds up to some value and for none above it, such as a length whose plan fits.
    - `values`: the candidates, in rising order.

    Returns the value, or None where it holds for none.
    """
    index = bisect_left(values, True, key=lambda value: not fits(value))
    return values[index - 1] if index else None
