"""What an engine tells about its requests."""

from typing import NamedTuple

import numpy as np

from jdllm.serving.request import Request


class StepUpdate(NamedTuple):
    """What one denoising step did to one request.

    - `request`: its id in the engine; from `LLM` its index in the call.
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


class Ended(NamedTuple):
    """The last update of a request.

    - `request`: its id in the engine.
    - `state`: the request as it ended.
    - `error`: why it failed; `None` where it finished.
    """

    request: int
    state: Request
    error: Exception | None


Update = StepUpdate | Ended


class Stats(NamedTuple):
    """Counts of an engine since it was made, and what it holds now.

    - `waiting`, `running`: requests.
    - `finished`, `failed`, `aborted`: requests that ended so.
    - `evaluated`: forward evaluations of the model, as the device reports them.
    - `free_pages`, `pages`: of the KV pool, without the scratch page.
    - `rebuilt`: how often the KV pool was lost with an executable and made again.
    """

    waiting: int
    running: int
    finished: int
    failed: int
    aborted: int
    evaluated: int
    free_pages: int
    pages: int
    rebuilt: int
