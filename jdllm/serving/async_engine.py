"""The engine for asyncio: a thread drives it, and updates arrive in the event loops that asked."""

import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from jdllm.serving.engine import Engine, Updates
from jdllm.serving.spec import RequestSpec
from jdllm.serving.submitted import Submitted
from jdllm.serving.updates import Update

GATHERED = 0.25
"""Seconds at most for which an engine with nothing to do waits for further requests."""

QUIET = 0.02
"""Seconds after a request within which others are taken for company of it: clients that start together reach
a server some milliseconds apart."""


class AsyncEngine:
    """Drives an engine as long as it has requests, beside whoever else uses it.

    Arguments:
    - `engine`: what runs the requests; it is not closed with this.
    - `on_dead`: called with what `Engine.step` raised when the engine cannot go on, after all requests have
      ended with that error; by the thread that drives, which ends with it.

    `error` is what that was, `None` as long as the engine lives.

    Raises `ConfigError` for a model on the devices of several processes.
    """

    def __init__(self, engine: Engine, *, on_dead: Callable[[Exception], None] = lambda _: None):
        engine.scheduler.limits.check_alone()
        self._engine = engine
        self._on_dead = on_dead
        self.error: Exception | None = None
        self._work = threading.Condition()
        self._on_their_way = 0
        self._arrivals = 0
        self._closed = False
        self._thread = threading.Thread(target=self._drive, name="jdllm-engine", daemon=True)
        self._thread.start()

    def submit(self, specs: Sequence[RequestSpec], *, updates: Updates = "later") -> Submitted:
        """Take in the requests of a call, in order of arrival.

        Arguments:
        - `updates`: "every" for updates as they happen, "later" for updates at the end of a block.

        Returns an iterator over the updates, for the caller's event loop. Raises the errors of `Engine.add`,
        and `error` if the engine has stopped.
        """
        with self._work:
            if self.error is not None:
                raise self.error
            submitted = Submitted(self._engine, specs, updates)
            self._arrivals += 1
            self._work.notify()
        return submitted

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Say that a request is on its way, until it is submitted or refused.

        Requests that arrive together then start together: requests that are a step apart would stay so, and
        each of their refreshes would be smaller, with more padding. Nobody waits where something runs.
        """
        with self._work:
            self._on_their_way += 1
            self._arrivals += 1
            self._work.notify()
        try:
            yield
        finally:
            with self._work:
                self._on_their_way -= 1
                self._work.notify()

    async def run(self, spec: RequestSpec, *, updates: Updates = "later") -> AsyncGenerator[Update]:
        """Denoise one request.

        Arguments:
        - `spec`: the request.
        - `updates`: "every" for updates as they happen, "later" for updates at the end of a block.

        Yields its updates; the last one is `Ended`, which has the error of a request that failed. Leaving
        the iteration, or cancelling the task that waits in it, aborts the request. Raises as `submit` does.
        """
        with self.submit([spec], updates=updates) as submitted:
            async for update in submitted:
                yield update

    def close(self) -> None:
        """Stop driving; requests that are left stay where they are."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()

    def _drive(self) -> None:
        while True:
            with self._work:
                if self._engine.idle:
                    self._work.wait_for(lambda: self._closed or not self._engine.idle)
                    self._gather()
                if self._closed:
                    return
            try:
                self._engine.step()
            except Exception as error:
                self._die(error)
                return

    def _gather(self) -> None:
        """Wait until nobody is on the way and nobody has come for a while; the lock is held."""
        end = time.monotonic() + GATHERED
        while not self._closed and (left := end - time.monotonic()) > 0:
            arrivals = self._arrivals
            if self._on_their_way:
                self._work.wait_for(lambda: self._closed or not self._on_their_way, left)
            elif not self._work.wait_for(
                lambda seen=arrivals: self._closed or self._arrivals != seen, min(QUIET, left)
            ):
                return

    def _die(self, error: Exception) -> None:
        with self._work:
            self.error = error
        try:
            self._engine.fail(error)
        finally:
            self._on_dead(error)
