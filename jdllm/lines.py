"""Lines on standard error that say how far something long has come, where no terminal shows a bar."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 10.0
"""Between two lines, and before the first."""


@contextlib.contextmanager
def told_in_lines(line: Callable[[float], str]) -> Iterator[None]:
    """Print a line every `SECONDS` seconds, from another thread.

    Arguments:
    - `line`: what to print, from the seconds that have passed.
    """
    start, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(SECONDS):
            if sys.stderr is not None:
                print(line(time.monotonic() - start), file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="jdllm-lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def time_left(done: float, total: float, seconds: float) -> str:
    """About how long the rest of `total` takes where `done` took so many seconds."""
    return f"about {seconds * (total - done) / done:.0f} s to go" if done else "how long is not known yet"
