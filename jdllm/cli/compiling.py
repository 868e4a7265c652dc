"""Says that a program is being compiled, where that takes long."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE, UNWATCHED_PATIENCE = 1.0, 10.0
"""Seconds of compiling after which something is said, in a terminal and elsewhere."""

_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"

# Compiling takes about as many times as long as the tracing and lowering before it (seen on two CPU cores,
# and on an H100 with the bundled model and with LLaDA-8B's shape).
_PER_LOWERING = {"cpu": 8.0}
_PER_LOWERING_ON_CARDS = 2.3


class _Watch:
    """Listens to JAX; shows a message while a program takes long, and `None` when it is compiled."""

    def __init__(self, show: Callable[[str | None], None], patience: float):
        self._show, self._patience = show, patience
        self._traced = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def __call__(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _TRACED:
            self._traced = max(self._traced, duration_secs)
        elif event == _LOWERED:
            self._timer = threading.Timer(self._patience, self._tell, [self._traced + duration_secs])
            self._timer.daemon = True
            self._timer.start()
        elif event == _COMPILED:
            self.stop()

    def stop(self) -> None:
        """The program is compiled, or nobody waits for it any more."""
        with self._lock:
            self._traced = 0.0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._show(None)

    def _tell(self, lowering: float) -> None:
        with self._lock:
            if self._timer is not None:
                self._show(_message(lowering))


def _message(lowering: float) -> str:
    import jax

    wait = lowering * _PER_LOWERING.get(jax.default_backend(), _PER_LOWERING_ON_CARDS)
    return f"compiling (about {max(1, round(wait))} s) ..."


def _print(message: str | None) -> None:
    if message is not None and sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def told_of_compiling(show: Callable[[str | None], None] = _print) -> Iterator[None]:
    """Say when a program takes long to compile, and about how long.

    Arguments:
    - `show`: takes the message, and `None` when it is over; by default a line on standard error.
    """
    import jax

    watched = sys.stderr is not None and sys.stderr.isatty()
    watch = _Watch(show, PATIENCE if watched else UNWATCHED_PATIENCE)
    jax.monitoring.register_event_duration_secs_listener(watch)
    try:
        yield
    finally:
        watch.stop()
        jax.monitoring.unregister_event_duration_listener(watch)
