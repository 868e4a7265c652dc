"""What rules carry from step to step, between requests and the arrays of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.decoding.rules import initial_states
from jdllm.planning.ladder import Entry
from jdllm.serving.request import Request


def packed_states(
    requests: Sequence[Request], candidates: Sequence[np.ndarray], entry: Entry
) -> dict[str, dict[str, np.ndarray]]:
    """`Batch.states` of requests whose head rows follow one another.

    Arguments:
    - `candidates`: for each request the positions of its head rows.
    """
    stops = np.cumsum([0, *map(len, candidates)])
    states = initial_states(entry.head_rows, entry.segments)
    for index, request in enumerate(requests):
        rule = request.acceptance
        if rule is None:
            continue
        for array in rule.state:
            carried = request.rule_state[array.name]
            packed = states[rule.name][array.name]
            if array.per_row:
                packed[stops[index] : stops[index + 1]] = carried[candidates[index]]
            else:
                packed[index] = carried
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
