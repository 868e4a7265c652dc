"""What a runner of one kind of part hands over: a packed part, ready to run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jdllm.compiling.executable import Program
from jdllm.decoding.encoded_trace import Steps
from jdllm.serving.request import Request


class Stored(NamedTuple):
    """What a request finds after a refresh.

    - `forwarded`: the positions that it forwards until the next one, rising.
    - `rows`: how many rows of each layer are stored.
    """

    forwarded: np.ndarray
    rows: int


class Launch(NamedTuple):
    """A packed part.

    - `run`: puts it on the device's queue and returns its `EncodedTrace`, or what `take` takes; it may not be
      there yet.
    - `candidates`: for each request the positions of its head rows, which follow one another in the trace.
    - `stored`: for each request what a refresh stores of it, `None` where nothing is.
    - `take`: of a stage of preparation, takes in what it found; returns its steps where it was one, or else
      how many evaluations of the model it did.
    - `rows`: packed rows of one step with padding, 0 where they are those of its requests.
    - `quick`: whether `run` waits for nothing that the device does, such as the turns of a loop.
    - `steps`: that it does, where it leaves tokens on the device.
    - `left_at`: for each request where its tokens begin among those that parts leave on the device, as
      `Unseen.source` counts, or for a decode `Sequences.source`; `None` where it leaves none.
    """

    run: Callable[[], Any]
    candidates: list[np.ndarray]
    stored: Sequence[Stored | None]
    take: Callable[[Any], Steps | int] | None = None
    rows: int = 0
    quick: bool = False
    steps: int = 1
    left_at: Sequence[int] | None = None


class Compiled(Protocol):
    """What compiles the entries of a ladder.

    - `programs`: the programs, as far as plans tell before anything is compiled.
    - `warm`: compile all that is not compiled yet.
    """

    def programs(self) -> Iterator[Program]: ...

    def warm(self) -> None: ...


class Launcher(Protocol):
    """Packs requests for parts of one kind, and changes none of them.

    `max_steps`: denoising steps at most. Raises `MemoryBudgetError` where the part does not fit, before
    anything of it has run.
    """

    def __call__(self, requests: list[Request], max_steps: int) -> Launch: ...
