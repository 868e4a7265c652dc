"""Gives back the memory that large bodies took: glibc keeps freed memory for its threads otherwise."""

import asyncio
import ctypes
from collections.abc import Callable

LARGE = 64 << 10
"""Bytes of a body after which memory is worth giving back."""

_PAUSE_SECONDS = 1.0
"""Between a large body and giving back, so that a flood of them costs one call each second."""

_TRIM_THRESHOLD = -1
"""The number of the parameter in glibc's `malloc.h`."""

_KEPT = 8 << 20
"""Free bytes at the end of what a thread allocates from; glibc keeps up to 64 MiB, and no call frees them."""


def keep_little() -> None:
    """Let every thread keep little of what it frees. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)


class FreedMemory:
    """Gives freed memory back to the system, in a thread and after a pause. Does nothing without glibc."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._waiting = False

    def give_back(self) -> None:
        """Give back soon what is free then. Calls that come before that are served by the same."""
        if self._trim is not None and not self._waiting:
            self._waiting = True
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._give_back, self._trim)

    def _give_back(self, trim: Callable[[int], int]) -> None:
        self._waiting = False
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
