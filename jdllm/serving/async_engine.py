"""The engine for asyncio: a thread drives it, and updates arrive in the event loops that asked."""

import asyncio
import threading
from collections.abc import AsyncGenerator

from jdllm.serving.engine import Engine, Updates
from jdllm.serving.spec import RequestSpec
from jdllm.serving.updates import Ended, Update


class AsyncEngine:
    """Drives an engine as long as it has requests, beside whoever else uses it.

    Arguments:
    - `engine`: what runs the requests; it is not closed with this.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._work = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._drive, name="jdllm-engine", daemon=True)
        self._thread.start()

    async def run(self, spec: RequestSpec, *, updates: Updates = "later") -> AsyncGenerator[Update]:
        """Denoise one request.

        Arguments:
        - `spec`, `updates`: as of `Engine.add`.

        Yields its updates; the last one is `Ended`, which has the error of a request that failed. Leaving
        the iteration, or cancelling the task that waits in it, aborts the request. Raises what `Engine.add`
        raises.
        """
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Update]()

        def deliver(update: Update) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(told.put_nowait, update)

        request = self._engine.add(spec, updates=updates, deliver=deliver)
        with self._work:
            self._work.notify()
        ended = False
        try:
            while not ended:
                update = await told.get()
                ended = isinstance(update, Ended)
                yield update
        finally:
            if not ended:
                self._engine.abort(request)

    def close(self) -> None:
        """Stop driving; requests that are left stay where they are."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()

    def _drive(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._closed or not self._engine.idle)
                if self._closed:
                    return
            try:
                self._engine.step()
            except Exception as error:
                self._engine.fail(error)
