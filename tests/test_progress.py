"""The progress bar of a call."""

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.progress import shown
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
