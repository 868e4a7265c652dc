"""The lowest layout of a graph by integer programming, to compare `first_fit` with."""

import itertools

import numpy as np
from scipy import optimize, sparse

from jdllm.planning.graph import Graph
from jdllm.planning.planner import Layout, first_fit


def exact(graph: Graph, time_limit: float = 60.0) -> Layout:
    """Offsets that minimise the peak.

    Of two tensors that are alive together one lies below the other, a binary variable; offsets and peak
    are real. HiGHS solves it, to a relative gap of 1e-6.

    Arguments:
    - `graph`: what to place.
    - `time_limit`: seconds.

    Returns a layout that is optimal, or the best that was found in the time. Raises `TimeoutError` where
    none was found.
    """
    count = len(graph.tensors)
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(count), 2)
        if graph.first[i] <= graph.last[j] and graph.first[j] <= graph.last[i]
    ]
    # Numbers near 1 keep the solver's absolute tolerances harmless.
    scale = first_fit(graph).peak or 1
    sizes = graph.sizes / scale
    # Columns: offsets, one binary for each pair (1: i below j), the peak.
    rows = np.zeros((2 * len(pairs) + count + 1, count + len(pairs) + 1))
    high = np.zeros(len(rows))
    for n, (i, j) in enumerate(pairs):
        rows[2 * n, [i, j, count + n]] = 1, -1, 1
        high[2 * n] = 1 - sizes[i]
        rows[2 * n + 1, [j, i, count + n]] = 1, -1, -1
        high[2 * n + 1] = -sizes[j]
    for i in range(count):
        rows[2 * len(pairs) + i, [i, -1]] = 1, -1
        high[2 * len(pairs) + i] = -sizes[i]
    rows[-1, -1], high[-1] = -1, -graph.lower_bound / scale
    binary = np.r_[np.zeros(count), np.ones(len(pairs)), 0]
    cost = np.zeros(rows.shape[1])
    cost[-1] = 1
    result = optimize.milp(
        cost,
        integrality=binary,
        bounds=optimize.Bounds(0, 1),
        constraints=(sparse.csr_array(rows), -np.inf, high),
        options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
    )
    if result.x is None:
        raise TimeoutError(f"no layout of {count} tensors within {time_limit} s")
    return _settle(graph, result.x[:count])


def _settle(graph: Graph, offsets: np.ndarray) -> Layout:
    """Whole bytes for real offsets: each tensor rests on the tensors of its lifetime that start below it."""
    exact_offsets = [0] * len(offsets)
    placed: list[int] = []
    for i in np.argsort(offsets, kind="stable").tolist():
        below = (
            exact_offsets[j] + int(graph.sizes[j])
            for j in placed
            if graph.first[i] <= graph.last[j] and graph.first[j] <= graph.last[i]
        )
        exact_offsets[i] = max(below, default=0)
        placed.append(i)
    ends = np.array(exact_offsets) + graph.sizes
    return Layout(tuple(exact_offsets), int(ends.max(initial=0)))
