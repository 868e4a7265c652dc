"""Chooses how requests generate that leave this to the engine, by what each way has taken so far."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jdllm.serving.auto_spec import AutoSpec, Way
from jdllm.serving.demands import HOST_SECONDS
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec
from jdllm.serving.updates import PartDone

PRIOR = 16
"""What is expected of a way before anything is known of it counts as so many evaluations."""

HALF_LIFE = 4096
"""After so many further evaluations what is known counts half: work that changes is noticed."""


class Expected(NamedTuple):
    """What is expected of an evaluation: its `seconds`, and the `tokens` that it commits to each request."""

    seconds: float
    tokens: float


def quickest(expected: Sequence[Expected]) -> int:
    """Which of several ways commits most tokens in a second; the first of equals."""
    return max(range(len(expected)), key=lambda i: expected[i].tokens / expected[i].seconds)


@dataclasses.dataclass(slots=True)
class _Mean:
    """A mean over evaluations."""

    total: float = 0.0
    evaluations: float = 0.0

    def add(self, total: float, evaluations: int) -> None:
        self.total += total
        self.evaluations += evaluations

    def with_prior(self, prior: float) -> float:
        return (self.total + PRIOR * prior) / (self.evaluations + PRIOR)

    def fade(self, evaluations: int) -> None:
        self.total *= 0.5 ** (evaluations / HALF_LIFE)
        self.evaluations *= 0.5 ** (evaluations / HALF_LIFE)


class Ways:
    """Chooses how requests generate that leave this to the engine, once each, when it starts.

    A way is expected to commit as many tokens as it has committed so far, and its evaluations to take as long
    as they took where as many requests ran, within a factor of two. Before anything is known of a way it is
    expected to commit all that it can, in the estimated time, which is a bound. So every way is tried that
    might be the quickest.

    Arguments:
    - `classes`: the class of a request's state, for each class of what may be asked for.
    - `estimate`: seconds of an evaluation at least, of so many requests that have so many rows each, behind
      so many stored rows each.
    - `in_step`: other processes have to choose the same, so no clock may: estimates alone say how long
      evaluations take.
    """

    def __init__(
        self,
        classes: Mapping[type[RequestSpec], type[Request]],
        estimate: Callable[[int, float, int], float],
        *,
        in_step: bool,
    ):
        self._classes, self._estimate, self._in_step = classes, estimate, in_step
        self._tokens: dict[tuple[str, int], _Mean] = defaultdict(_Mean)
        self._seconds: dict[tuple[str, int, int], _Mean] = defaultdict(_Mean)

    def expected(self, way: Way, running: int) -> Expected:
        """What is expected of an evaluation of a way.

        Arguments:
        - `running`: how many requests run, which are taken to generate in this way too.
        """
        estimated = self._estimate(running, way.rows, len(way.spec.prompt))
        seconds = self._seconds[way.name, way.length, running.bit_length()].with_prior(estimated)
        return Expected(seconds, self._tokens[way.name, way.length].with_prior(way.most))

    def begun(self, request: Request, running: int) -> Request:
        """A request as it starts: where it leaves this to the engine, in the way that is chosen.

        Arguments:
        - `running`: how many requests run, this one included.
        """
        if not isinstance(request.spec, AutoSpec):
            return request
        ways = request.spec.ways
        way = ways[quickest([self.expected(way, running) for way in ways])]
        begun = self._classes[type(way.spec)](way.spec, request.id)
        begun.way, begun.created = way, request.created
        return begun

    def learn(self, done: PartDone, requests: Sequence[Request]) -> None:
        """Take in how long a part took, and how long the device waited for it. Parts of prompts do not count,
        nor those of several ways.

        Arguments:
        - `requests`: of the part, as they were before it.
        """
        ways = {request.way and (request.way.name, request.way.length) for request in requests}
        generates = all(request.committed is not None for request in requests)
        way = ways.pop() if len(ways) == 1 and generates and not self._in_step else None
        if way is not None:
            # The device waits longer where something is compiled, which is no way's own.
            seconds = done.busy + min(done.idle, HOST_SECONDS)
            for mean in self._seconds.values():
                mean.fade(done.steps)
            self._seconds[*way, len(requests).bit_length()].add(seconds, done.steps)

    def end(self, request: Request) -> None:
        """Take in how many tokens the evaluations of a request committed that has finished."""
        if request.way is None:
            return
        for mean in self._tokens.values():
            mean.fade(request.steps)
        tokens = int(np.count_nonzero(request.committed_in >= 0))
        self._tokens[request.way.name, request.way.length].add(tokens, request.steps)
