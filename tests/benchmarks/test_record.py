"""What result files say of the run."""

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.record import card_state, environment

PROGRAM = "from benchmarks.record import environment\ncommand = environment()['command']\n"


@pytest.mark.parametrize(
    ("module", "arguments", "command"),
    [
        ("jdllm_test_bench.operators.inner", ["--rows", "3", "--out", "x"], "--rows 3"),
        ("jdllm_test_bench.outer", [], ""),
    ],
)
def test_the_command_names_the_whole_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, arguments: list[str], command: str
):
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
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


class TestCardState:
    @pytest.fixture
    def answer(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        """Put an nvidia-smi on the path that prints a text a moment later, where it is asked what we ask."""

        def install(text: str) -> None:
            program = tmp_path / "nvidia-smi"
            asked = "--query-gpu=clocks.sm,power.draw --format=csv,noheader"
            program.write_text(f'#!/bin/sh\n/bin/sleep 0.2\n[ "$*" = "{asked}" ] && printf "{text}"\n')
            program.chmod(0o755)

        monkeypatch.setenv("PATH", str(tmp_path))
        return install

    def test_is_read_while_the_work_goes_on(self, answer):
        answer("1605 MHz, 698.12 W\\n210 MHz, 70.00 W\\n")
        runs = []
        assert card_state(lambda: runs.append(1)) == {"sm_mhz": 1605, "watts": 698.12}
        assert runs

    def test_what_the_card_does_not_know_is_left_out(self, answer):
        answer("[N/A], [N/A]\\n")
        assert card_state(lambda: None) == {}

    @pytest.mark.usefixtures("answer")
    def test_is_left_out_without_nvidia_smi(self):
        assert card_state(lambda: None) == {}
