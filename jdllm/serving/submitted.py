"""A call's requests in an engine, for asyncio: their updates, and their end."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Self

from jdllm.serving.engine import Engine, Updates
from jdllm.serving.spec import RequestSpec
from jdllm.serving.updates import Ended, Update

_GATHERED = 0.05
"""Seconds between two times at which the event loop is woken for updates that need not come as they happen.

The event loop and the thread of the engine share the interpreter: each time costs both of them."""


class Submitted:
    """Iterate over it for the updates of its requests, which are named by their index in `specs`; inside
    `with`, which aborts all open requests at its end.

    Arguments:
    - `engine`: takes the requests in; somebody else drives it.
    - `specs`: in order of arrival.
    - `updates`: "every" for updates as they happen; "later" for updates at the end of a block, or gathered
      over some hundredths of a second where each step comes alone.

    `ids` are the ids of the requests in the engine. Updates wait for a slow reader: at most one for each
    denoising step. If `Engine.add` raises an error, so does this, and none of the requests is left.
    """

    def __init__(self, engine: Engine, specs: Sequence[RequestSpec], updates: Updates):
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[Update | None] = asyncio.Queue()
        self._left: dict[int, int] = {}
        self._error: Exception | None = None
        self._gathers = updates == "later"
        self._gathered: deque[Update] = deque()
        self._expected = False
        call = engine.new_call()
        try:
            for index, spec in enumerate(specs):
                self._left[engine.add(spec, updates=updates, deliver=self._deliver, call=call)] = index
        except BaseException:
            self.close()
            raise
        self.ids = tuple(self._left)

    def _deliver(self, update: Update) -> None:
        """Take in an update; of the engine's thread."""
        self._gathered.append(update)
        if self._expected and not isinstance(update, Ended):
            return
        self._expected = self._gathers
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        """Hand all updates to the reader; of the event loop's thread, as all that follows."""
        self._expected = self._gathers  # before the look: an update that comes now is seen then
        while self._gathered:
            self._told.put_nowait(self._gathered.popleft())
        if self._gathers:
            self._loop.call_later(_GATHERED, self._tell_again)

    def _tell_again(self) -> None:
        self._expected = False  # before the look: an update that comes now wakes the loop itself
        if self._gathered:
            self._tell()

    def end(self, error: Exception) -> None:
        """Abort all open requests, and raise `error` in the reader next. Of the event loop's thread."""
        self.close()
        self._error = error
        self._told.put_nowait(None)  # wakes it up

    def close(self) -> None:
        """Abort all open requests."""
        for request in self._left:
            self._engine.abort(request)
        self._left = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        if not self._left and self._error is None:
            raise StopAsyncIteration
        update = await self._told.get() if self._error is None else None
        if update is None or self._error is not None:
            raise self._error or StopAsyncIteration
        index = self._left[update.request]
        if isinstance(update, Ended):
            del self._left[update.request]
        return update._replace(request=index)
