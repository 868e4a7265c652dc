"""Host memory that can be pinned."""

from pathlib import Path

import pytest

from jdllm.errors import ConfigError
from jdllm.planning.host import RUNTIME_LIMIT, available, check_pinnable, let_pin, runtime_limit

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Path]:
    """One with 100 GiB left, whose control group has 40 of 60 left."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {100 * 2**20} kB\n")
    (tmp_path / "memory.max").write_text(f"{60 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{20 * GIB}\n")
    return {"meminfo": tmp_path / "meminfo", "group": tmp_path}


def test_the_least_of_all_limits_counts(machine: dict[str, Path]):
    assert available(**machine) == 40 * GIB
    (machine["group"] / "memory.max").write_text("max\n")
    assert available(**machine) == 100 * GIB


def test_nothing_tells(tmp_path: Path):
    assert available(meminfo=tmp_path / "none", group=tmp_path) is None
    check_pinnable(GIB, meminfo=tmp_path / "none", group=tmp_path)


def test_more_than_there_is_is_refused(machine: dict[str, Path]):
    check_pinnable(40 * GIB, **machine)
    with pytest.raises(ConfigError, match=f"this machine has {40 * GIB} left"):
        check_pinnable(40 * GIB + 1, **machine)


def test_more_than_the_runtime_pins_is_refused(monkeypatch: pytest.MonkeyPatch, machine: dict[str, Path]):
    monkeypatch.delenv(RUNTIME_LIMIT, raising=False)
    (machine["group"] / "memory.max").write_text("max\n")
    with pytest.raises(ConfigError, match=f"set {RUNTIME_LIMIT}=91 before"):
        check_pinnable(90 * GIB + 1, **machine)
    monkeypatch.setenv(RUNTIME_LIMIT, "96")
    check_pinnable(90 * GIB + 1, **machine)


def test_a_command_raises_the_runtimes_limit_and_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RUNTIME_LIMIT, "")
    monkeypatch.delenv(RUNTIME_LIMIT)
    let_pin(60 * GIB)
    assert runtime_limit() == 64 * GIB
    let_pin(80 * GIB + 1)
    assert runtime_limit() == 81 * GIB
    let_pin(100 * GIB)
    assert runtime_limit() == 81 * GIB
