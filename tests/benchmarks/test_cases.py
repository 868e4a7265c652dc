"""One command runs all benchmarks."""

import pytest

from benchmarks.__main__ import main
from benchmarks.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_case_names_its_own_command(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: python3 -m benchmarks {name} " in said
    without = ("rerun", "results", "plan_peak", "torch_step", "static_batcher", "trace_picture")
    assert ("--out OUT" in said) == (name not in without)


def test_the_list_has_all_cases(capsys: pytest.CaptureFixture[str]):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CASES)


@pytest.mark.parametrize("arguments", [[], ["nothing"]])
def test_no_such_case(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    assert f"expected one of {', '.join(CASES)}" in capsys.readouterr().err
