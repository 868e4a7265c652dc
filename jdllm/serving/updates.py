"""What an engine tells about its requests and about itself."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jdllm.decoding.encoded_trace import LISTED
from jdllm.serving.request import Request
from jdllm.serving.scheduler import Kind

_NOTHING = np.zeros((0, 0), LISTED)


class StepUpdate(NamedTuple):
    """What one denoising step did to one request.

    - `request`: its id in the engine; from `LLM` its index in the call.
    - `step`: the step that was done, counted from 0 over the request.
    - `positions`: int32 `[evaluated]`, positions of the sequence that were masked and evaluated, rising.
    - `provisional`: int32 `[evaluated]`, the token chosen for each of them in this step.
    - `committed`: bool `[evaluated]`, which of them were committed for good.
    - `logprobs`: f32 `[evaluated]`, the log-probability of each provisional token in the distribution that
      its confidence is measured on.
    - `likeliest`: `LISTED` `[evaluated, listed]`, the likeliest ids of that distribution for each of the
      committed ones, as many as the request asked for, and unspecified for others.
    """

    request: int
    step: int
    positions: np.ndarray
    provisional: np.ndarray
    committed: np.ndarray
    logprobs: np.ndarray
    likeliest: np.ndarray = _NOTHING

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
    """Counts of an engine since it was made, and its present requests and pages.

    - `waiting`, `running`: requests.
    - `finished`, `failed`, `aborted`: requests that ended so.
    - `evaluated`: forward evaluations of the model, as the device reports them.
    - `free_pages`, `pages`: of the KV pool, without the scratch page.
    - `rebuilt`: how often the KV pool was lost with an executable and made again.
    - `tokens`: that were committed for good.
    - `parts`: that were collected, by kind.
    - `rows`, `head_rows`: packed rows and head rows of the requests in these, by kind, once for every step
      that a part did.

    Steps that are repeated after the pool was lost count again.
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
    tokens: int
    parts: Mapping[Kind, int]
    rows: Mapping[Kind, int]
    head_rows: Mapping[Kind, int]


class RequestState(NamedTuple):
    """A request that waits or runs.

    - `id`: its id in the engine.
    - `running`: whether it has started.
    - `age`: seconds since it arrived.
    - `prompt_tokens`: tokens of its prompt.
    - `length`, `masked`: positions of its sequence, and how many of them are masked now.
    - `steps`: denoising steps done.
    """

    id: int
    running: bool
    age: float
    prompt_tokens: int
    length: int
    masked: int
    steps: int


class PartDone(NamedTuple):
    """A part that an engine has collected.

    - `kind`: its executable.
    - `requests`: how many it served.
    - `rows`, `head_rows`: packed rows and head rows of these in one step.
    - `steps`: denoising steps that it did.
    - `seconds`: from its submission to its collection.
    - `idle`: seconds before its submission in which the device had nothing to do, though there were requests.
    """

    kind: Kind
    requests: int
    rows: int
    head_rows: int
    steps: int
    seconds: float
    idle: float
