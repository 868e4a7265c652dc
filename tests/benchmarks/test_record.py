"""What result files say of the run."""

import runpy
import sys
import time
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.record import environment, median_seconds, sustained, waited_seconds

PROGRAM = "from benchmarks.record import environment\ncommand = environment()['command']\n"


@pytest.mark.parametrize(
    ("module", "arguments", "command"),
    [
        ("jdllm_test_bench.operators.inner", ["--rows", "3", "--out", "x"], "--rows 3"),
        ("jdllm_test_package", ["load", "--out", "x"], "load"),
    ],
)
def test_the_command_names_the_whole_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, arguments: list[str], command: str
):
    package = "." not in module
    path = tmp_path.joinpath(*module.split("."), *["__main__"] * package).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest", *arguments])
    ran = runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ran["command"] == f"python3 -m {module} {command}".strip()


def test_the_command_of_a_file_names_the_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["benchmarks/step.py", "--out", "x", "--peers"])
    assert environment()["command"] == "python3 benchmarks/step.py --peers"


class TestSustained:
    @pytest.fixture
    def answer(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        """Put an nvidia-smi on the path that says two lines and no more, where it is asked what we ask."""

        def install(first: str, second: str) -> None:
            program = tmp_path / "nvidia-smi"
            asked = "-i 0 --query-gpu=clocks.sm,power.draw.instant --format=csv,noheader -lms 100"
            lines = f'echo "{first}"\necho "{second}"\nexec /bin/sleep 60'
            program.write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] || exit 1\n{lines}\n')
            program.chmod(0o755)

        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(record, "SETTLING_SECONDS", 0.0)
        monkeypatch.setattr(record, "SUSTAINED_SECONDS", 0.5)
        return install

    def test_means_of_what_is_said_while_the_work_goes_on(self, answer):
        answer("1605 MHz, 698.12 W", "1505 MHz, 690 W")
        runs = []
        seconds, state = sustained(lambda: time.sleep(0.01) or runs.append(1))
        assert state == pytest.approx({"sm_mhz": 1555, "watts": 694.06})
        assert 10 < len(runs) < 60
        assert seconds == pytest.approx(0.5 / len(runs), rel=0.3)

    def test_what_the_card_does_not_know_is_left_out(self, answer):
        answer("[N/A], [N/A]", "[N/A], [N/A]")
        assert sustained(lambda: None).state == {}

    @pytest.mark.usefixtures("answer")
    def test_without_nvidia_smi_a_single_call_does(self):
        runs = []
        seconds, state = sustained(lambda: time.sleep(0.01) or runs.append(1))
        assert (state, runs) == ({}, [1])
        assert seconds >= 0.01


class TestSeconds:
    """A device that starts a call 1 ms late or after the one before, and tells of an end 0.5 ms late."""

    class Device:
        now, idle_from = 0.0, 0.0

        def __init__(self, seconds: float):
            self.seconds, self.calls = seconds, 0

        def run(self) -> float:
            self.calls += 1
            self.idle_from = max(self.now + 1e-3, self.idle_from) + self.seconds
            return self.idle_from

        def wait(self, end: float) -> None:
            self.now = max(self.now, end) + 5e-4

    @pytest.fixture(params=[1e-5, 4e-3, 0.3])
    def device(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
        device = self.Device(request.param)
        monkeypatch.setattr(record.time, "perf_counter", lambda: device.now)
        monkeypatch.setattr(record.jax, "block_until_ready", device.wait)
        return device

    def test_of_the_device_are_what_further_calls_take(self, device: Device):
        assert median_seconds(device.run) == pytest.approx(device.seconds)

    def test_waited_for_have_the_start_and_the_news_of_the_end(self, device: Device):
        assert waited_seconds(device.run) == pytest.approx(device.seconds + 1.5e-3)
        assert device.calls == 7

    def test_of_calls_that_take_long_are_waited_for(self, device: Device):
        device.seconds = 2.0
        assert median_seconds(device.run, repeats=3, warm_up=1) == pytest.approx(2.0015)
        assert device.calls == 5
