"""Counts evaluations: those that scores take, and the parts of an engine."""

from collections.abc import Callable
from typing import Any

import pytest

from jdllm.llm import LLM
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request


def count_evaluations(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an item with each evaluation of scores from now on."""
    scorer, evaluations = llm.scorer, []
    plain = scorer.run

    def run(function: Callable[[], Any]) -> Any:
        evaluations.append(None)
        return plain(function)

    monkeypatch.setattr(scorer, "run", run)
    return evaluations


def note_parts(engine: Engine, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Notes for every part of a kind its requests, and how many of them wait for tokens of a part before."""
    found, submit = list[tuple[int, int]](), engine.runner.submit

    def note(asked: Kind, requests: list[Request], max_steps: int) -> Any:
        if asked is kind:
            found.append((len(requests), sum(request.awaited is not None for request in requests)))
        return submit(asked, requests, max_steps)

    monkeypatch.setattr(engine.runner, "submit", note)
    return found
