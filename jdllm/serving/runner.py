"""Runs parts of iterations: packs them, submits them in order, and collects their results."""

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jdllm.decoding.encoded_trace import EncodedTrace, Steps, decode
from jdllm.serving.demands import Kind
from jdllm.serving.launch import Launch, Launcher
from jdllm.serving.request import Request
from jdllm.serving.rule_states import hand_out


class Ran(NamedTuple):
    """A part that has run.

    - `found`: what it returned, as NumPy arrays.
    - `launched`, `ended`: when the host put it on the device's queue, and when its results were there.
    """

    found: Any
    launched: float
    ended: float


class Pending(NamedTuple):
    """A part that was submitted; `packed` is when its packing ended."""

    kind: Kind
    requests: list[Request]
    launch: Launch
    ran: Future[Ran]
    packed: float


class Runner:
    """Runs parts on one device, in the order in which they are submitted.

    Arguments:
    - `launchers`: for each kind of part what packs it.

    A thread of its own puts parts on the device's queue: a device loop whose turns the device counts keeps
    whoever starts it waiting, and meanwhile the next part is packed. Where the device is idle, a quick launch
    is over when `submit` returns. Another thread waits for results. So the time is known at which the device
    has ended a part, however late the part is collected.
    """

    def __init__(self, launchers: Mapping[Kind, Launcher]):
        self._launchers = launchers
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="jdllm")
        self._results = ThreadPoolExecutor(1, thread_name_prefix="jdllm-results")
        self._last: Future[Ran] | None = None

    def submit(self, kind: Kind, requests: list[Request], max_steps: int) -> Pending:
        """Pack a part and put it behind the parts that were submitted before; changes no request.

        Arguments:
        - `kind`, `requests`: of the part.
        - `max_steps`: denoising steps at most.

        Raises `MemoryBudgetError` if the part does not fit, before anything of it has run.
        """
        launch = self._launchers[kind](requests, max_steps)
        packed = time.perf_counter()
        listed = any(request.sampling.listed for request in requests)
        rules = {request.acceptance.name for request in requests if request.acceptance is not None}

        def run() -> tuple[Any, float]:
            launched = time.perf_counter()
            found = launch.run()
            if isinstance(found, EncodedTrace):
                # Nothing is transferred that nobody in the part reads.
                states = {name: state for name, state in found.states.items() if name in rules}
                found = found._replace(likeliest=found.likeliest if listed else None, states=states)
            jax.tree.map(lambda x: x.copy_to_host_async(), found)
            return found, launched

        def wait() -> Ran:
            found, launched = running.result()
            return Ran(jax.tree.map(np.asarray, found), launched, time.perf_counter())

        idle = self._last is None or self._last.done()
        running = self._queue.submit(run)
        if idle and launch.quick:
            # An idle device waits for the launch, and the launch would wait for what this thread does next.
            concurrent.futures.wait([running])
        self._last = self._results.submit(wait)
        return Pending(kind, requests, launch, self._last, packed)

    def collect(self, pending: Pending) -> Steps | int:
        """Wait for a part: the steps that it did, or evaluations that were none. Raises what the device
        raised."""
        found = pending.ran.result().found
        if isinstance(found, EncodedTrace):
            hand_out(found.states, pending.requests, pending.launch.candidates)
        return decode(found) if pending.launch.take is None else pending.launch.take(found)

    def probe(self) -> None:
        """Write a number to the device and read it back; raises where the device does not answer."""
        try:
            np.asarray(jax.device_put(np.int32(1)))
        except Exception as error:
            raise RuntimeError(f"the device does not answer any more: {error}") from error

    def between_parts[T](self, function: Callable[[], T]) -> T:
        """`function()`, between the parts that were submitted before and after this call."""
        return self._queue.submit(function).result()

    def close(self) -> None:
        """Wait for all submitted parts; no part can be submitted afterwards."""
        self._queue.shutdown()
        self._results.shutdown()
