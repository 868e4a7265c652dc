"""`jdllm` whose device stops answering after some parts; the variable DYING_PARTS says how many.

The process ends as soon as it may: it is kept for DYING_SECONDS, so that a test can ask what it says.
"""

import itertools
import os
import time

from jdllm.cli import main
from jdllm.serving.async_engine import AsyncEngine
from jdllm.serving.runner import Runner

parts = itertools.count(1)
collect, init = Runner.collect, AsyncEngine.__init__


def collect_some(self, pending):
    if next(parts) > int(os.environ["DYING_PARTS"]):
        raise RuntimeError("the device is lost")
    return collect(self, pending)


def probe(self):
    raise RuntimeError("the device does not answer any more")


def init_with_delay(self, engine, *, on_dead):
    def later(error: Exception) -> None:
        time.sleep(float(os.environ["DYING_SECONDS"]))
        on_dead(error)

    init(self, engine, on_dead=later)


Runner.collect, Runner.probe = collect_some, probe
AsyncEngine.__init__ = init_with_delay  # type: ignore[method-assign]
main()
