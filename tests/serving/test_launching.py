"""When a part is put on the device's queue, beside the thread that submits it."""

import threading
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import pytest

from jdllm.decoding.encoded_trace import EncodedTrace
from jdllm.serving.demands import Kind
from jdllm.serving.launch import Launch
from jdllm.serving.request import Request
from jdllm.serving.runner import Pending, Runner

Run = Callable[[], EncodedTrace]


def found() -> EncodedTrace:
    """What a part of no head rows returns."""
    return EncodedTrace(jnp.zeros((1, 0), jnp.int32), None, {})


class Device:
    """Runs what it is told to, as the launches of one kind of part.

    - `run`, `quick`: of the next launch.
    """

    def __init__(self):
        self.run: Run = found
        self.quick = False
        self.runner = Runner({Kind.REUSE: self._launch})

    def _launch(self, requests: list[Request], max_steps: int) -> Launch:
        return Launch(self.run, [], [], take=lambda _: 0, quick=self.quick)

    def submit(self, run: Run, *, quick: bool) -> Pending:
        self.run, self.quick = run, quick
        return self.runner.submit(Kind.REUSE, [], 1)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.runner.close()


def test_a_quick_part_is_on_an_idle_device_once_it_is_submitted(device: Device):
    for _ in range(20):
        ran = threading.Event()

        def run(ran: threading.Event = ran) -> EncodedTrace:
            threading.Event().wait(0.002)
            ran.set()
            return found()

        pending = device.submit(run, quick=True)
        assert ran.is_set()
        device.runner.collect(pending)


@pytest.mark.parametrize("quick", [True, False])
def test_nobody_waits_behind_a_part_that_waits(device: Device, quick: bool):
    """The second part is put on the queue once the first one, whose launch waits, is there."""
    goes_on, order = threading.Event(), list[int]()

    def first() -> EncodedTrace:
        goes_on.wait(20)
        order.append(1)
        return found()

    def second() -> EncodedTrace:
        order.append(2)
        return found()

    parts = [device.submit(first, quick=False), device.submit(second, quick=quick)]
    assert not order
    goes_on.set()
    for part in parts:
        device.runner.collect(part)
    assert order == [1, 2]


def test_a_quick_part_that_fails_does_so_when_it_is_collected(device: Device):
    def fails() -> EncodedTrace:
        raise RuntimeError("no device")

    pending = device.submit(fails, quick=True)
    with pytest.raises(RuntimeError, match="no device"):
        device.runner.collect(pending)
