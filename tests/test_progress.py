"""The progress bar of a call."""

import re
import time

import numpy as np
import pytest

from jdllm import lines
from jdllm.checkpoints.byte_progress import reporter
from jdllm.compiling.executables import Program
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.progress import shown, warming
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended, StepUpdate
from tests.engines import generation_request


def run(config: ModelConfig, progress: bool) -> None:
    """Two requests of two tokens, the first of which gets both and the second one."""
    sampling = SamplingParams(gen_length=2)
    requests = [generation_request(i, np.array([1]), sampling, config) for i in range(2)]
    with shown(2, progress) as take:
        for request in (*requests, requests[0]):
            take(commit(request))
            if request.finished:
                take(Ended(request.id, request, None))


def commit(request: Request) -> StepUpdate:
    position = request.candidates()[:1]
    update = StepUpdate(request.id, request.steps, position, np.array([5]), np.array([True]), np.zeros(1))
    request.advance(position, update.provisional, update.logprobs)
    return update


def test_it_counts_finished_requests_and_tokens(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    run(config, True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "1/2" in err
    assert "3 tokens" in err


def test_only_where_there_is_a_terminal_and_it_is_asked_for(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    run(config, True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    run(config, False)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come soon, and there is no terminal."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(lines, "SECONDS", 0.02)


@pytest.mark.usefixtures("often")
def test_a_warm_up_says_in_lines_what_is_compiled_and_how_long_it_may_take(
    capsys: pytest.CaptureFixture[str],
):
    with warming(4, True) as take:
        time.sleep(0.1)
        take(1, Program(len, (), {}, name="full step of 128 rows"))
        time.sleep(0.1)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"compiling: 0 of 4 executables after 0 s, how long is not known yet", first)
    so_far = r"1 of 4 executables \(the last one: full step of 128 rows\) after 0 s"
    assert re.fullmatch(rf"compiling: {so_far}, about [01] s to go", last)


@pytest.mark.usefixtures("often")
def test_loading_says_in_lines_how_far_it_is(capsys: pytest.CaptureFixture[str]):
    with reporter(True, 4 << 20, "loading weights") as advance:
        advance(2 << 20)
        time.sleep(0.1)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == "loading weights: 2 of 4 MiB after 0 s, about 0 s to go"


@pytest.mark.usefixtures("often")
def test_nobody_hears_lines_who_did_not_ask_or_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with warming(4, False), reporter(False, 1, "loading"):
        time.sleep(0.05)
    monkeypatch.setattr(lines, "SECONDS", 60)
    with warming(4, True), reporter(True, 1, "loading"):
        pass
    assert capsys.readouterr() == ("", "")
