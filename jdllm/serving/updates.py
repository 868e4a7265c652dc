"""What an engine tells about its requests and about itself."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jdllm.decoding.encoded_trace import LISTED
from jdllm.serving.demands import Kind
from jdllm.serving.request import Request

_NOTHING = np.zeros((0, 0), LISTED)


class StepUpdate(NamedTuple):
    """What one denoising step did to one request.

    - `request`: its id in the engine; from `LLM` its index in the call.
    - `step`: the step that was done, counted from 0 over the request.
    - `positions`: int32 `[evaluated]`, positions of the sequence that were masked and evaluated, rising.
      With an `editing_threshold` these are also the positions whose token the step replaced.
    - `provisional`: int32 `[evaluated]`, the token chosen for each of them in this step.
    - `committed`: bool `[evaluated]`, which of them were committed: for good, unless `settled` is a number.
    - `logprobs`: f32 `[evaluated]`, the log-probability of each provisional token in the distribution that
      its confidence is measured on.
    - `likeliest`: `LISTED` `[evaluated, listed]`, the likeliest ids of that distribution for each of the
      committed ones, as many as the request asked for, and unspecified for others.
    - `settled`: with an `editing_threshold` the position from which on later steps may still replace
      committed tokens; `None` where nothing is replaced.
    """

    request: int
    step: int
    positions: np.ndarray
    provisional: np.ndarray
    committed: np.ndarray
    logprobs: np.ndarray
    likeliest: np.ndarray = _NOTHING
    settled: int | None = None

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepUpdate):
            return False
        return self.settled == other.settled and all(map(np.array_equal, self[:-1], other[:-1]))

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
    - `tokens`: that were committed; who replaces one does not count.
    - `parts`: that were collected, by kind.
    - `served`, `rows`, `padding`, `head_rows`: requests in these, their packed rows, packed rows that belong
      to nobody, and head rows, by kind, once for every step that a part did.
    - `busy`: seconds of the device, by kind.
    - `waited`: seconds in which requests that were ready waited for a part, by kind, of all together.

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
    served: Mapping[Kind, int]
    rows: Mapping[Kind, int]
    padding: Mapping[Kind, int]
    head_rows: Mapping[Kind, int]
    busy: Mapping[Kind, float]
    waited: Mapping[Kind, float]


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


class PartTimes(NamedTuple):
    """When a part did what, in seconds of `time.perf_counter`.

    - `ready`: when each of its requests could be served.
    - `packing`, `submitted`: when the host began and ended to pack it.
    - `began`, `ended`: when the device did. A part begins where the part before it has ended, or where the
      host puts it on the device's queue, its arguments included.
    - `collected`: when the host took in what it found.
    """

    ready: tuple[float, ...]
    packing: float
    submitted: float
    began: float
    ended: float
    collected: float


class PartDone(NamedTuple):
    """A part that an engine has collected.

    - `kind`: its executable.
    - `ids`: the requests that it served.
    - `rows`, `padding`, `head_rows`: packed rows of these in one step, packed rows that belong to nobody, and
      head rows.
    - `steps`: denoising steps that it did.
    - `idle`: seconds before its submission in which the device had nothing to do, though there were requests.
    - `times`: when it did what.
    """

    kind: Kind
    ids: tuple[int, ...]
    rows: int
    padding: int
    head_rows: int
    steps: int
    idle: float
    times: PartTimes

    @property
    def requests(self) -> int:
        """How many requests it served."""
        return len(self.ids)

    @property
    def seconds(self) -> float:
        """Seconds from its submission to its collection."""
        return self.times.collected - self.times.submitted

    @property
    def busy(self) -> float:
        """Seconds of the device."""
        return self.times.ended - self.times.began

    @property
    def waited(self) -> float:
        """Seconds in which its requests were ready and waited, all together."""
        return sum(self.times.submitted - ready for ready in self.times.ready)
