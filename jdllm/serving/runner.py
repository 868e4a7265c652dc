"""Runs parts of iterations: packs them, submits them in order, and collects what they did."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jdllm.decoding.encoded_trace import Steps, decode
from jdllm.serving.launch import Launch, Launcher
from jdllm.serving.request import Request
from jdllm.serving.scheduler import Kind


class Pending(NamedTuple):
    """A part that was submitted."""

    kind: Kind
    requests: list[Request]
    launch: Launch
    trace: Future[Array]


class Runner:
    """Runs parts on one device, in the order in which they are submitted.

    Arguments:
    - `launchers`: for each kind of part what packs it.

    A thread of its own puts parts on the device's queue: a device loop whose turns the device counts keeps
    whoever starts it waiting, and meanwhile the next part is packed.
    """

    def __init__(self, launchers: Mapping[Kind, Launcher]):
        self._launchers = launchers
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="jdllm")

    def submit(self, kind: Kind, requests: list[Request], max_steps: int) -> Pending:
        """Pack a part and put it behind those that were submitted before; changes no request.

        Arguments and errors: as of `Launcher`.
        """
        launch = self._launchers[kind](requests, max_steps)

        def run() -> Array:
            trace = launch.run()
            trace.copy_to_host_async()
            return trace

        return Pending(kind, requests, launch, self._queue.submit(run))

    def collect(self, pending: Pending) -> Steps | int:
        """Wait for a part: the steps that it did, or evaluations that were none. Raises what the device
        raised."""
        found = np.asarray(pending.trace.result())
        return decode(found) if pending.launch.take is None else pending.launch.take(found)

    def probe(self) -> None:
        """Write a number to the device and read it back; raises where the device does not answer."""
        try:
            np.asarray(jax.device_put(np.int32(1)))
        except Exception as error:
            raise RuntimeError(f"the device does not answer any more: {error}") from error

    def between_parts[T](self, function: Callable[[], T]) -> T:
        """`function()`, behind what was submitted before and before what is submitted later."""
        return self._queue.submit(function).result()

    def close(self) -> None:
        """Wait for what was submitted; nothing can be submitted afterwards."""
        self._queue.shutdown()
