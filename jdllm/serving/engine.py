"""The engine: admits requests, packs a step, runs it and hands out what it committed."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jdllm.decoding.rules import head_level
from jdllm.models.config import ModelConfig
from jdllm.serving.packing import pack
from jdllm.serving.request import Request
from jdllm.serving.runner import StepRunner


class StepUpdate(NamedTuple):
    """What one denoising step did to one request.

    - `request`: index of the request in its call.
    - `step`: the step that was done, counted from 0 over the request.
    - `positions`: int32 `[evaluated]`, positions of the sequence that were masked and evaluated, rising.
    - `provisional`: int32 `[evaluated]`, the token chosen for each of them in this step.
    - `committed`: bool `[evaluated]`, which of them were committed for good.
    """

    request: int
    step: int
    positions: np.ndarray
    provisional: np.ndarray
    committed: np.ndarray


class Engine:
    """Denoises many requests at once, first come first served.

    Arguments:
    - `runner`: runs the steps of the model.
    - `config`: the model.
    - `max_num_batched_tokens`: packed rows of one step; a request that needs more runs alone.
    """

    def __init__(self, runner: StepRunner, config: ModelConfig, max_num_batched_tokens: int):
        self._runner = runner
        self._config = config
        self._budget = max_num_batched_tokens

    def run(self, requests: Sequence[Request], *, every_step: bool = False) -> Iterator[StepUpdate]:
        """Denoise all requests to their end.

        Arguments:
        - `requests`: fresh requests, in order of arrival. They hold the results afterwards.
        - `every_step`: return to the host after every step, so that updates arrive as they happen;
          otherwise the device runs to the end of a block. Tokens are the same.

        Yields one update for each request and step.
        """
        waiting = deque(requests)
        running: list[Request] = []
        while waiting or running:
            self._admit(waiting, running)
            yield from self._dispatch(running, every_step)
            running = [r for r in running if not r.finished]

    def _admit(self, waiting: deque[Request], running: list[Request]) -> None:
        rows = sum(r.rows for r in running)
        while waiting and (not running or rows + waiting[0].rows <= self._budget):
            request = waiting.popleft()
            request.started = time.perf_counter()
            rows += request.rows
            running.append(request)

    def _dispatch(self, requests: list[Request], every_step: bool) -> Iterator[StepUpdate]:
        batch, candidates = pack(requests, self._config)
        max_steps = 1 if every_step else batch.segments.quota.shape[1]
        level = max(head_level(r.sampling) for r in requests)
        trace = self._runner.run(batch, max_steps, requests[0].mask_id, level)
        steps, tokens, committed = jax.device_get(trace)
        ends = np.cumsum([len(positions) for positions in candidates])[:-1]
        tokens, committed = (
            np.split(x[:steps, : sum(map(len, candidates))], ends, 1) for x in (tokens, committed)
        )
        for step in range(steps):
            for request, positions, choice, took in zip(requests, candidates, tokens, committed, strict=True):
                yield self._take_in(request, positions, choice[step], took[step])

    @staticmethod
    def _take_in(request: Request, positions: np.ndarray, choice: np.ndarray, took: np.ndarray) -> StepUpdate:
        masked = request.tokens[positions] == request.mask_id
        update = StepUpdate(request.index, request.steps, positions[masked], choice[masked], took[masked])
        request.advance(positions[took], choice[took])
        return update
