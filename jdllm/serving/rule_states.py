"""What rules carry from step to step, between requests and the arrays of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.decoding.registry import numbered
from jdllm.planning.ladder import Entry
from jdllm.serving.request import Request


def packed_states(
    requests: Sequence[Request], candidates: Sequence[np.ndarray], entry: Entry
) -> dict[str, dict[str, np.ndarray]]:
    """`Batch.states` of requests whose head rows follow one another; empty where no rule carries anything.

    Arguments:
    - `candidates`: for each request the positions of its head rows.
    """
    stops = np.cumsum([0, *map(len, candidates)])
    states: dict[str, dict[str, np.ndarray]] = {}
    for _, rule in numbered():
        for array in rule.state:
            size = entry.head_rows if array.per_row else entry.segments
            packed = np.full(size, array.initial, array.dtype)
            for index, request in enumerate(requests):
                if request.acceptance != rule:
                    continue
                carried = request.rule_state[array.name]
                if array.per_row:
                    packed[stops[index] : stops[index + 1]] = carried[candidates[index]]
                else:
                    packed[index] = carried
            states.setdefault(rule.name, {})[array.name] = packed
    return states


def hand_out(
    states: Mapping[str, Mapping[str, Any]], requests: Sequence[Request], candidates: Sequence[np.ndarray]
) -> None:
    """Give each request what its rule carries after a part; it holds once the part's steps are taken in."""
    stops = np.cumsum([0, *map(len, candidates)])
    for index, request in enumerate(requests):
        rule = request.acceptance
        if rule is None or rule.name not in states:
            continue
        found = {}
        for array in rule.state:
            carried = np.asarray(states[rule.name][array.name])
            if array.per_row:
                found[array.name] = request.rule_state[array.name].copy()
                found[array.name][candidates[index]] = carried[stops[index] : stops[index + 1]]
            else:
                found[array.name] = carried[index]
        request.find_state(found)
