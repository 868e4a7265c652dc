"""The engine: takes requests in, runs their steps together, and tells what was committed."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from jdllm.compiling.executables import Program
from jdllm.decoding.encoded_trace import Steps
from jdllm.errors import NonFiniteError, naming
from jdllm.planning.account import Account
from jdllm.planning.asking import check_room
from jdllm.serving.background import Background
from jdllm.serving.demands import CHEAP, Demand, Kind, Part
from jdllm.serving.entries import COUNTED, Entries, Entry, Updates, state_of
from jdllm.serving.flight import Flight
from jdllm.serving.matched import prepared
from jdllm.serving.mode import EngineParts, Mode
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.request import Request
from jdllm.serving.runner import Pending, Runner
from jdllm.serving.scheduler import Scheduler
from jdllm.serving.spec import RequestSpec
from jdllm.serving.trace import Trace
from jdllm.serving.updates import Ended, PartDone, RequestState, Stats, Update

_ids = itertools.count()

_TOLD_TOKENS = 4
"""Tokens of causal requests that come together where each is wanted: the device waits between dispatches."""

_LOOKS = 5e-3
"""Seconds after which a thread that waits for its turn to drive the engine looks for its updates."""


class Engine:
    """Denoises many requests at once, first come first served.

    Arguments:
    - `runner`: runs parts of iterations.
    - `pool`: of keys and values.
    - `scheduler`: says what runs next.
    - `account`: the memory of the device.
    - `mode`, `parts`: how the model generates, and what the engine is made of for this.
    - `background`: compiles sizes while others serve.
    - `non_finite`: what a request fails with whose values are infinite or not numbers.

    `add`, `abort`, `run`, `stats` and `requests` may be called by any thread; `step` by one at a time. A
    request fails alone where its values are not finite or nothing can be packed with it, and with the other
    requests of its part where an executable fails. Such a failure may take the KV pool with it: then it is
    made again, and requests whose keys were in it go back to their last refresh and repeat their steps, to
    the same tokens. Where the device does not answer any more, `step` raises.

    `observe`, where it is set, is called with every part that was collected, by whoever calls `step`; `trace`
    takes in what the engine does, and is closed with it. `entries` are the requests by id.
    """

    observe: Callable[[PartDone], None] | None = None
    trace: Trace | None = None

    def __init__(
        self,
        runner: Runner,
        pool: KvPool,
        scheduler: Scheduler,
        account: Account,
        mode: Mode,
        parts: EngineParts,
        *,
        background: Background,
        non_finite: Callable[[Request], NonFiniteError],
    ):
        self.runner = runner
        self.pool = pool
        self.scheduler = scheduler
        self._account = account
        self._mode = mode
        self.parts = parts
        self._background = background
        self._non_finite = non_finite
        self._lock = threading.RLock()
        self._arrivals: deque[Entry] = deque()
        self._aborts: deque[int] = deque()
        self.entries = Entries(self._end, non_finite, parts.ways)
        self._flight = Flight()

    @property
    def evaluated(self) -> int:
        """Forward evaluations of the model, as the device reports them."""
        return self._flight.evaluated

    @property
    def longest_served(self) -> int:
        """Tokens of the longest sequence that the device has room for."""
        return self.parts.longest_served

    def add(
        self,
        spec: RequestSpec,
        *,
        updates: Updates = "later",
        deliver: Callable[[Update], None] | None = None,
        call: int | None = None,
    ) -> int:
        """Take a request in; it starts with one of the next steps.

        Arguments:
        - `updates`: "every" returns to the host after every step of it, so that its updates arrive as they
          happen; otherwise the device may run to the end of a block, and `StepUpdate`s come "later" or not at
          all, which saves time. Tokens are the same.
        - `deliver`: called with each of its updates, by whoever calls `step`.
        - `call`: a number of `new_call`. Requests of one call share its turns, so that calls of many requests
          do not hold up others. Without `call` the request is a call of its own.

        Returns its id, unique in the process. Raises `RequestError` or `KvPoolError` for what can never run.
        """
        number = next(_ids)
        request = self._mode.requests[type(spec)](spec, number)
        self.parts.check(spec)
        life = self.parts.costs.life(spec)
        if life.pages:
            check_room(self._account, life.rows, life.pages)
        self.scheduler.check(life)
        self._arrivals.append(Entry(request, request.id if call is None else call, updates, deliver))
        return request.id

    def new_call(self) -> int:
        """A number for requests that somebody asks for together."""
        return next(_ids)

    def abort(self, request: int) -> None:
        """Forget a request, wherever it is; one that has ended is none. It gets no further updates."""
        self._aborts.append(request)
        if self._lock.acquire(blocking=False):
            try:
                self._take_arrivals()
            finally:
                self._lock.release()

    def stats(self) -> Stats:
        """Counts since the engine was made, and what it holds now."""
        return Stats(
            waiting=len(self.scheduler.waiting) + len(self._arrivals),
            running=len(self.scheduler.running),
            free_pages=self.pool.free_pages,
            pages=self.pool.pages,
            **{name: self.entries.counts[name] for name in COUNTED},
            **self._flight.counts(),
        )

    def requests(self) -> list[RequestState]:
        """The requests that wait or run, in the order of their arrival."""
        entries = [*self._arrivals, *self.entries]  # in this order none is missed on its way
        states, running = {entry.request.id: entry.request for entry in entries}, set(self.scheduler.running)
        return [state_of(states[request], running=request in running) for request in sorted(states)]

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not (self.entries or self._arrivals)

    def run(self, specs: Sequence[RequestSpec], *, updates: Updates = "later") -> Iterator[Update]:
        """Denoise requests to their end, beside those of others; whoever waits drives the engine.

        Arguments:
        - `specs`: in order of arrival.
        - `updates`: "every" step, "later", or "none"; tokens are the same.

        Yields the updates of these requests, which are named by their index in `specs`. Leaving it aborts
        what is left of them. Raises what `add` raises, before anything of them has run.
        """
        mine: deque[Update] = deque()
        left: dict[int, int] = {}
        call = self.new_call()
        try:
            for index, spec in enumerate(specs):
                with naming("request", index, len(specs)):
                    left[self.add(spec, updates=updates, deliver=mine.append, call=call)] = index
            while left:
                while mine:
                    update = mine.popleft()
                    index = left[update.request]
                    if isinstance(update, Ended):
                        del left[update.request]
                    yield update._replace(request=index)
                if left and self._lock.acquire(timeout=_LOOKS):
                    try:
                        if not mine:
                            self.step()
                    finally:
                        self._lock.release()
        finally:
            for request in left:
                self.abort(request)

    def step(self) -> list[Update]:
        """Submit what can run, and collect the part that was submitted first.

        Behind the next submission updates are delivered and the trace is written: whoever reads them is busy
        while the device is, too. A step that delivers collects nothing.

        Returns the updates of this step, of all requests; none where nothing is left to do. Raises where the
        engine cannot go on, as when the device does not answer: then `fail` ends what is left.
        """
        with self._lock:
            self._take_arrivals()
            updates = self._submit(*self._ahead())
            if (further := self._ahead())[0]:
                updates += self._submit(*further)
            if self.trace is not None:
                self.trace.catch_up()
            if not self.entries.deliver() and self._flight:
                updates += self._collect(self._flight.first)
            if not self.entries:
                self.entries.deliver()
            return updates

    def fail(self, error: Exception) -> None:
        """End all requests with `error`: all are told before anything is cleaned up, which may fail too."""
        with self._lock:
            self._take_arrivals()
            for entry in self.entries:
                self.entries.tell(Ended(entry.request.id, entry.request, error))
            self.entries.deliver()
            for entry in self.entries:
                self._leave(entry.request.id, "failed")
            self._flight.drain()
            self._free()

    def programs(self) -> list[Program]:
        """What the ladder of this engine needs compiled."""
        warmed = self.parts.warmed(shared=self.scheduler.limits.shared)
        return [program for kind in warmed for program in kind.programs()]

    def warm(self) -> None:
        """Compile the whole ladder: nothing that fits it compiles afterwards."""
        with self._lock:
            for kind in self.parts.warmed(shared=self.scheduler.limits.shared):
                kind.warm()

    def settle(self) -> None:
        """Wait until nothing is compiled in the background, as before steps are timed."""
        self._background.wait()

    def between_parts[T](self, function: Callable[[], T]) -> T:
        """`function()`, while no part of the engine runs."""
        return self.runner.between_parts(lambda: self.parts.with_room(function))

    def close(self) -> None:
        """Wait for what runs, forget all requests and free the KV pool."""
        self._background.close()
        with self._lock:
            self._take_arrivals()
            for entry in self.entries:
                self._leave(entry.request.id, "aborted")
            self._flight.drain()
            self.runner.close()
            self._free()
            if self.trace is not None:
                self.trace.close()

    def _take_arrivals(self) -> None:
        while self._arrivals:
            if not self.entries:
                self._flight.rest()
            entry = self._arrivals.popleft()
            self.entries.add(entry)
            life, priority = self.parts.costs.life(entry.request.spec), entry.request.sampling.priority
            self.scheduler.add(entry.request.id, life, entry.call, priority)
        while self._aborts:
            request = self._aborts.popleft()
            if request in self.entries:
                self._leave(request, "aborted")

    def _leave(self, request: int, how: str) -> Request:
        state = self.entries.remove(request, how)
        if self.trace is not None:
            self.trace.left(state, how)
        self.parts.forget(request)
        if self._in_pool(state) and request in self.scheduler.running:
            self.pool.release(state, keep=how != "failed")
        self.scheduler.remove(request)
        return state

    def _submit(self, ahead: Mapping[int, Request], demands: Mapping[int, Demand]) -> list[Update]:
        """Submit parts, also of requests that go `ahead`; both arguments are as `_ahead` returns them."""
        admitted, running = self.scheduler.admit(), len(self.scheduler.running)
        for state in [self.entries.begin(request, running) for request in admitted]:
            if self._in_pool(state):
                self.pool.admit(state)
        busy, ready, failed = self._flight.ids, dict(demands), list[Update]()
        rest = [self.entries[i] for i in self.scheduler.running if i not in busy]
        for request in rest if self.scheduler.limits.in_step else prepared(rest, others=bool(busy)):
            try:
                ready[request.id] = self.parts.costs.demand(request)
            except Exception as error:
                failed.append(self._end(request, error))
        # Who goes ahead begins the next iteration, while the present one is in flight.
        unseen = any(request.awaited is not None for request in ahead.values())
        kinds = [kind for kind in self._flight.kinds if not (unseen and kind in CHEAP)]
        for part in self.scheduler.plan(ready, kinds, 0 if ahead else self._flight.rows, self.parts.held()):
            failed += self._submit_part(part, ready, ahead)
        return failed

    def _ahead(self) -> tuple[dict[int, Request], dict[int, Demand]]:
        """Requests in flight that a further part may serve, as they will be then, and what they take."""
        later = [(r, self.parts.costs.demand(r)) for r in self._flight.ahead(self.entries)]
        cheap = [(request, demand) for request, demand in later if demand.kind in CHEAP]
        pays = self.scheduler.pays_ahead([demand for _, demand in cheap])
        ahead = {request.id: request for request, _ in cheap if pays}
        demands = {request.id: demand for request, demand in cheap if pays}
        for request in self._flight.behind_stores(self.entries):
            if (demand := self.parts.costs.demand(request)).kind is Kind.REUSE:
                ahead[request.id], demands[request.id] = request, demand
        return ahead, demands

    def _submit_part(
        self, part: Part, demands: Mapping[int, Demand], ahead: Mapping[int, Request]
    ) -> list[Update]:
        """Submit a part; where it cannot be packed its halves instead, down to the requests at fault, which
        end. The others run in this turn all the same."""
        requests, packing = [self.entries[i] for i in part.ids], time.perf_counter()
        packed = [ahead.get(request.id, request) for request in requests]
        try:
            pending = self.runner.submit(part.kind, packed, self._steps(part, ahead))
        except Exception as error:
            self.runner.probe()
            self.pool.forget_contents()
            if ahead:  # they take tokens that the next part replaces: all at once, or when these are seen
                others = tuple(i for i in part.ids if i not in ahead)
                return self._submit_part(part._replace(ids=others), demands, {}) if others else []
            if len(requests) == 1:
                return [self._end(requests[0], error)]
            half = len(requests) // 2
            halves = (part._replace(ids=ids) for ids in (part.ids[:half], part.ids[half:]))
            return [update for each in halves for update in self._submit_part(each, demands, ahead)]
        pending, ready = pending._replace(requests=requests), [request.ready for request in packed]
        self._flight.add(pending, [demands[i] for i in part.ids], packing, ready)
        return []

    def _steps(self, part: Part, ahead: Mapping[int, Request]) -> int:
        """Steps of a part: fewer where somebody wants each as it comes, or tokens have not been seen. Who
        comes waits for two parts that decode."""
        told = any(map(self.entries.told_every, part.ids))
        unseen = any(ahead[i].awaited is not None for i in part.ids if i in ahead)
        if part.kind is not Kind.DECODE:
            return 1 if told or unseen else part.steps
        short = told or (unseen and self.scheduler.limits.shared)
        return min(part.steps, _TOLD_TOKENS) if short else part.steps

    def _collect(self, pending: Pending) -> list[Update]:
        try:
            steps = self.runner.collect(pending)
        except Exception as error:
            self._flight.drain()
            self.runner.probe()
            self.pool.forget_contents()
            self._rebuild_lost_pools()
            left = [request for request in pending.requests if request.id in self.entries]
            found = self._non_finite if isinstance(error, NonFiniteError) else lambda _: error
            return [self._end(request, found(request)) for request in left]
        done = self._flight.remove_first(len(steps.tokens) if isinstance(steps, Steps) else steps)
        self.entries.learn(done, pending.requests)
        self.scheduler.charge(Part(done.kind, done.ids, done.steps), done.busy, woke=done.idle > 0)
        if self.observe is not None:
            self.observe(done)
        if self.trace is not None:
            self.trace.part(done, {r.id: r for r in pending.requests if r.id in self.entries})
        for request, stored in zip(pending.requests, pending.launch.stored, strict=True):
            request.ready = done.times.collected
            if stored is not None and request.id in self.entries:
                request.store(*stored)
        return list(self.entries.take_in(pending, steps)) if isinstance(steps, Steps) else []

    def _end(self, request: Request, error: Exception | None) -> Update:
        if isinstance(error, NonFiniteError) and self._in_pool(request):
            self.runner.between_parts(lambda: self.pool.clean(request))
        ended = self.entries.tell(Ended(request.id, request, error))
        self._leave(request.id, "finished" if error is None else "failed")
        return ended

    def _free(self) -> None:
        self.pool.free()
        self.parts.clear()

    def _rebuild_lost_pools(self) -> None:
        """Make the KV pool again where a failed executable took it along; clear the holders anyway."""
        self.parts.clear()
        if self.pool.lost:
            self.pool.free()
            self.entries.counts["rebuilt"] += 1
            for entry in self.entries:
                if self._in_pool(entry.request):
                    entry.request.go_back()
                    self.parts.forget(entry.request.id)

    def _in_pool(self, request: Request) -> bool:
        return self.parts.costs.life(request.spec).pages > 0
