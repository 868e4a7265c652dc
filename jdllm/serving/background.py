"""Compiles sizes that fit better, while the engine goes on with larger ones."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from jdllm.planning.ladder import Entry, Sizes

_SWITCH_SECONDS = 5e-4
"""How long tracing, which runs in Python, may keep a thread of the engine waiting for its turn."""

_log = logging.getLogger("jdllm")


class Background:
    """Makes one entry of a ladder ready at a time, in a thread of its own.

    What cannot be made ready is logged and not tried again: the larger entry goes on serving.

    Arguments:
    - `in_step`: make it ready at once, while the engine waits: other processes, which have to choose the same
      entries, may take longer.
    """

    def __init__(self, *, in_step: bool = False) -> None:
        self._in_step = in_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jdllm-background")
        self._lock = threading.Condition()
        self._busy = self._closed = False

    @property
    def idle(self) -> bool:
        """Whether `start` would do anything."""
        return not (self._busy or self._closed)

    def start(self, sizes: Sizes, entry: Entry, name: str, make: Callable[[], object]) -> None:
        """Call `make` beside the engine, or at once, and then count `entry` as compiled.

        Nothing happens while another entry is made ready, and after `close`.

        Arguments:
        - `name`: what the log calls it.
        """
        with self._lock:
            if self.idle:
                self._busy = True
                made = self._thread.submit(self._run, sizes, entry, name, make)
            else:
                return
        if self._in_step:
            made.result()

    def wait(self) -> None:
        """Wait until nothing is made ready."""
        with self._lock:
            self._lock.wait_for(lambda: not self._busy)

    def close(self) -> None:
        """Start nothing any more, and wait for what has begun: a compiler cannot be interrupted."""
        with self._lock:
            self._closed = True
        self._thread.shutdown()

    def _run(self, sizes: Sizes, entry: Entry, name: str, make: Callable[[], object]) -> None:
        start = time.perf_counter()
        try:
            with _giving_way():
                make()
        except Exception:
            sizes.given_up.add(entry)
            _log.warning("a %s cannot be compiled; a larger one goes on serving", name, exc_info=True)
        else:
            sizes.compiled.add(entry)
            _log.info("compiled a %s in the background, in %.1f s", name, time.perf_counter() - start)
        finally:
            with self._lock:
                self._busy = False
                self._lock.notify_all()


@contextlib.contextmanager
def _giving_way() -> Iterator[None]:
    """Let other threads have the interpreter soon after they ask for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
