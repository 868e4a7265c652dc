"""A line says that something is compiled, where that takes long."""

import time

import jax
import pytest

from jdllm.cli import compiling
from jdllm.cli.compiling import told_of_compiling

PARTS = "jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile"
TRACED, LOWERED, COMPILED = (f"/jax/core/compile/{part}_duration" for part in PARTS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "UNWATCHED_PATIENCE", 0.05)


def compile_for(seconds: float) -> None:
    """The events of a program that JAX compiles."""
    jax.monitoring.record_event_duration_secs(TRACED, 2.0)
    jax.monitoring.record_event_duration_secs(LOWERED, 0.5)
    time.sleep(seconds)
    jax.monitoring.record_event_duration_secs(COMPILED, seconds)


def test_a_long_wait_is_announced_with_an_estimate(capsys: pytest.CaptureFixture[str]):
    with told_of_compiling():
        compile_for(0.3)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "compiling (about 20 s) ...\n")


def test_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(compiling, "UNWATCHED_PATIENCE", 0.5)
    with told_of_compiling():
        compile_for(0.0)
        time.sleep(0.7)
    assert capsys.readouterr().err == ""


def test_a_display_hears_of_the_end():
    heard: list[str | None] = []
    with told_of_compiling(heard.append):
        compile_for(0.3)
    assert heard == ["compiling (about 20 s) ...", None]


def test_nobody_listens_afterwards(capsys: pytest.CaptureFixture[str]):
    with told_of_compiling():
        pass
    compile_for(0.1)
    assert capsys.readouterr().err == ""


def test_jax_reports_the_events(monkeypatch: pytest.MonkeyPatch):
    heard: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 3 + 17.25).lower(1.5).compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    kinds = [event for event in heard if event in (TRACED, LOWERED, COMPILED)]
    assert kinds == [TRACED, LOWERED, COMPILED]
