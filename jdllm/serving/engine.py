"""The engine: admits requests, packs a step, runs it and hands out what it committed."""

import functools
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jdllm.decoding.caches import Phase
from jdllm.decoding.encoded_trace import EncodedTrace, Steps, decode
from jdllm.decoding.rules import head_level
from jdllm.models.config import ModelConfig
from jdllm.serving.cached_runner import CachedRunner
from jdllm.serving.packing import pack
from jdllm.serving.request import Request
from jdllm.serving.runner import StepRunner
from jdllm.serving.verifier import check_verifiable


class StepUpdate(NamedTuple):
    """What one denoising step did to one request.

    - `request`: index of the request in its call.
    - `step`: the step that was done, counted from 0 over the request.
    - `positions`: int32 `[evaluated]`, positions of the sequence that were masked and evaluated, rising.
    - `provisional`: int32 `[evaluated]`, the token chosen for each of them in this step.
    - `committed`: bool `[evaluated]`, which of them were committed for good.
    - `logprobs`: f32 `[evaluated]`, the log-probability of each provisional token in the distribution that
      its confidence is measured on.
    """

    request: int
    step: int
    positions: np.ndarray
    provisional: np.ndarray
    committed: np.ndarray
    logprobs: np.ndarray

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepUpdate) and all(map(np.array_equal, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


class Engine:
    """Denoises many requests at once, first come first served.

    Arguments:
    - `runner`: runs the steps of the model.
    - `config`: the model.
    - `max_num_batched_tokens`: packed rows of one step; a request that needs more runs alone.

    `evaluated` counts the forward evaluations of the model, as the device reports them.
    """

    def __init__(self, runner: StepRunner, config: ModelConfig, max_num_batched_tokens: int):
        self._runner = runner
        self._config = config
        self._budget = max_num_batched_tokens
        self.evaluated = 0

    @functools.cached_property
    def _cache(self) -> CachedRunner:
        return self._runner.cached(self._budget)

    def run(self, requests: Sequence[Request], *, every_step: bool = False) -> Iterator[StepUpdate]:
        """Denoise all requests to their end.

        Arguments:
        - `requests`: fresh requests, in order of arrival. They hold the results afterwards.
        - `every_step`: return to the host after every step, so that updates arrive as they happen;
          otherwise the device runs to the end of a block. Tokens are the same.

        Yields one update for each request and step. Raises `KvPoolError` for a request whose cache does not
        fit the pool, and `RequestError` for one that the verifier cannot serve, before anything has run; and
        `NonFiniteError` instead of the first update of a request whose values are infinite or not numbers.
        """
        for request in requests:
            check_verifiable(request, self._runner.verifier)
        waiting = deque(requests)
        running: list[Request] = []
        try:
            while waiting or running:
                if waiting:
                    self._admit(waiting, running)
                for group in _by_phase(running):
                    yield from self._dispatch(group, every_step)
                for request in running:
                    if request.finished and request.cached:
                        self._cache.release(request)
                running = [r for r in running if not r.finished]
        finally:
            for request in running:
                if request.cached:
                    self._cache.release(request)

    def _admit(self, waiting: deque[Request], running: list[Request]) -> None:
        rows = sum(r.rows for r in running)
        totals = rows + np.cumsum([r.rows for r in waiting])
        fitting = int(np.searchsorted(totals, self._budget, side="right"))
        admissible = list(itertools.islice(waiting, fitting if running else max(fitting, 1)))
        if any(r.cached for r in admissible) and not any(r.cached for r in running):
            self._cache.make_room([r for r in admissible if r.cached])
        for request in admissible:
            if request.cached and not self._cache.admit(request):
                return
            waiting.popleft()
            request.started = time.perf_counter()
            running.append(request)

    def _dispatch(self, requests: list[Request], every_step: bool) -> Iterator[StepUpdate]:
        trace, candidates = self._run(requests, every_step)
        stops = itertools.accumulate(map(len, candidates))
        parts = [slice(stop - len(own), stop) for own, stop in zip(candidates, stops, strict=True)]
        steps = decode(jax.device_get(trace))
        self.evaluated += len(steps.tokens)
        for step in map(Steps, *steps):
            for request, positions, part in zip(requests, candidates, parts, strict=True):
                yield self._take_in(request, positions, Steps(*(x[part] for x in step)))

    def _run(self, requests: list[Request], every_step: bool) -> tuple[EncodedTrace, list[np.ndarray]]:
        if requests[0].adaptive:
            return self._runner.adaptive.run(requests)
        level = max(head_level(r.sampling) for r in requests)
        if not requests[0].cached:
            batch, candidates = pack(requests, self._config)
            max_steps = 1 if every_step else batch.segments.quota.shape[1]
            return self._runner.run(batch, max_steps, requests[0].mask_id, level), candidates
        if requests[0].phase is not Phase.REUSE:
            return self._cache.refresh(requests, level)
        max_steps = 1 if every_step else min(r.reuse_steps for r in requests)
        return self._cache.reuse(requests, max_steps, level)

    def _take_in(self, request: Request, positions: np.ndarray, step: Steps) -> StepUpdate:
        masked = request.tokens[positions] == request.mask_id
        update = StepUpdate(request.index, request.steps, positions[masked], *(x[masked] for x in step))
        if not np.isfinite(update.logprobs).all():
            raise self._runner.non_finite(request)
        took = step.committed
        request.advance(positions[took], step.tokens[took], step.logprobs[took])
        return update


def _by_phase(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that one dispatch can serve: those without a cache, those to refresh, those that reuse, and
    those with a verifier."""

    def place(request: Request) -> int:
        if request.cached:
            return 2 if request.phase is Phase.REUSE else 1
        return 3 if request.adaptive else 0

    return [list(group) for _, group in itertools.groupby(sorted(requests, key=place), place)]
