"""The requests of an engine: who is told of their steps, and what a collected part commits to them."""

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jdllm.decoding.encoded_trace import Steps
from jdllm.errors import NonFiniteError
from jdllm.serving.request import Request, of_committed
from jdllm.serving.runner import Pending
from jdllm.serving.updates import PartDone, RequestState, StepUpdate, Update
from jdllm.serving.ways import Ways

COUNTED = ("finished", "failed", "aborted", "rebuilt", "tokens")
"""What `Entries.counts` counts, as `Stats` names it."""

Updates = Literal["every", "later", "none"]

End = Callable[[Request, Exception | None], Update]
"""Ends a request, which failed with an error where there is one, and returns the update that tells so."""


class Entry(NamedTuple):
    """A request of the engine.

    - `call`: requests with the same number share turns.
    - `updates`: whether its steps are told: "every" as they happen, "later", or "none".
    - `deliver`: takes its updates too.
    """

    request: Request
    call: int
    updates: Updates
    deliver: Callable[[Update], None] | None


def state_of(request: Request, *, running: bool) -> RequestState:
    """What is told of a request that waits or runs."""
    return RequestState(
        id=request.id,
        running=running,
        age=time.perf_counter() - request.created,
        prompt_tokens=len(request.prompt),
        length=len(request.tokens),
        masked=int(np.count_nonzero(request.tokens == request.mask_id)),
        steps=request.steps,
    )


class Entries:
    """The requests that wait or run, by their ids.

    Arguments:
    - `end`: a method that ends a request, and takes it out of here. It is held weakly: its engine holds the
      entries, and the memory of both is free as soon as nobody has the engine.
    - `non_finite`: makes the error of a request whose values are infinite or not numbers.
    - `ways`: chooses how requests generate that leave this to the engine.

    - `counts`: counts `tokens` that were committed, and requests by how they left.
    """

    def __init__(self, end: End, non_finite: Callable[[Request], NonFiniteError], ways: Ways | None):
        self._ends = weakref.WeakMethod(end)
        self._non_finite = non_finite
        self._ways = ways
        self._entries: dict[int, Entry] = {}
        self._delivered: dict[int, int] = {}
        self._told: list[tuple[Entry, Update]] = []
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: int) -> bool:
        return request in self._entries

    def __iter__(self) -> Iterator[Entry]:
        """All of them, in the order of their arrival; they may leave meanwhile."""
        return iter(list(self._entries.values()))

    def __getitem__(self, request: int) -> Request:
        return self._entries[request].request

    def add(self, entry: Entry) -> None:
        """Take a request in."""
        self._entries[entry.request.id] = entry
        self._delivered[entry.request.id] = 0

    def begin(self, request: int, running: int) -> Request:
        """Start a request that waited; returns it as it runs.

        Arguments:
        - `running`: how many requests run, this one included.
        """
        entry = self._entries[request]
        state = entry.request if self._ways is None else self._ways.begun(entry.request, running)
        self._entries[request] = entry._replace(request=state)
        state.started = state.ready = time.perf_counter()
        return state

    def learn(self, done: PartDone, requests: Sequence[Request]) -> None:
        """Take in how long a part of these requests took."""
        if self._ways is not None:
            self._ways.learn(done, requests)

    def remove(self, request: int, how: str) -> Request:
        """Take a request out.

        Arguments:
        - `how`: how it left, as the counts name it. Who was aborted is told nothing more.
        """
        del self._delivered[request]
        self.counts[how] += 1
        entry = self._entries.pop(request)
        if how == "finished" and self._ways is not None:
            self._ways.end(entry.request)
        if how == "aborted":
            self._told = [told for told in self._told if told[0] is not entry]
        return entry.request

    def told_every(self, request: int) -> bool:
        """Whether somebody waits for every step of a request."""
        return self._entries[request].updates == "every"

    def tell(self, update: Update) -> Update:
        """Keep an update for whoever asked for updates of its request; returns it."""
        entry = self._entries[update.request]
        if entry.deliver is not None:
            self._told.append((entry, update))
        return update

    def deliver(self) -> bool:
        """Deliver all updates that are kept; whether there were any."""
        told, self._told = self._told, []
        for entry, update in told:
            if entry.deliver is not None:
                entry.deliver(update)
        return bool(told)

    def take_in(self, pending: Pending, steps: Steps) -> Iterator[Update]:
        """Commit the steps of a part that was collected.

        A request whose update fails, as its `decode` may, ends alone.
        """
        candidates = pending.launch.candidates
        stops = itertools.accumulate(map(len, candidates))
        told: list[tuple[Request, np.ndarray, slice]] = []
        finite = bool(np.isfinite(steps.logprobs).all())
        for request, positions, stop in zip(pending.requests, candidates, stops, strict=True):
            part = slice(stop - len(positions), stop)
            if request.id in self and self._entries[request.id].updates == "none":
                own = Steps(*(x[:, part] for x in steps))
                yield from self._alone(request, self._advance_silently(request, positions, own, finite))
            else:
                told.append((request, positions, part))
        for step in map(Steps, *steps):
            for request, positions, part in told:
                if request.id in self:
                    own = Steps(*(x[part] for x in step))
                    yield from self._alone(request, self._advance(request, positions, own))

    def _end(self, request: Request, error: Exception | None) -> Update:
        end = self._ends()
        assert end is not None  # the engine is asking
        return end(request, error)

    def _alone(self, request: Request, updates: Iterator[Update]) -> Iterator[Update]:
        try:
            yield from updates
        except Exception as error:
            yield self._end(request, error)

    def _advance_silently(
        self, request: Request, positions: np.ndarray, steps: Steps, finite: bool
    ) -> Iterator[Update]:
        """Take in the steps of a request, of a part whose values may all be known to be `finite`."""
        if not (finite or np.isfinite(steps.logprobs).all()):
            yield self._end(request, self._non_finite(request))
            return
        edits = request.edits
        request.advance_many(positions, steps)
        self.counts["tokens"] += int(np.count_nonzero(steps.committed)) - (request.edits - edits)
        if request.finished:
            yield self._end(request, None)

    def _advance(self, request: Request, positions: np.ndarray, step: Steps) -> Iterator[Update]:
        if not len(positions):  # a part of a prompt is no step
            return
        shown = request.shown(positions, step)
        told = Steps(*(x[shown] for x in step))
        likeliest = told.likeliest[:, : request.sampling.listed]
        update = StepUpdate(request.id, request.steps, positions[shown], *told[:3], likeliest)
        if not np.isfinite(update.logprobs).all():
            yield self._end(request, self._non_finite(request))
            return
        edits = request.edits
        request.advance(*of_committed(positions, step))
        self.counts["tokens"] += int(np.count_nonzero(step.committed)) - (request.edits - edits)
        update = update._replace(settled=request.settled)
        tells = len(update.positions) or update.settled is not None
        if tells and update.step >= self._delivered[request.id]:
            self._delivered[request.id] = update.step + 1
            yield self.tell(update)
        if request.finished:
            yield self._end(request, None)
