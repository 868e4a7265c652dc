"""Counts the evaluations that scores take."""

from collections.abc import Callable
from typing import Any

import pytest

from jdllm.llm import LLM


def count_evaluations(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an item with each evaluation of scores from now on."""
    scorer, evaluations = llm.scorer, []
    plain = scorer.run

    def run(function: Callable[[], Any]) -> Any:
        evaluations.append(None)
        return plain(function)

    monkeypatch.setattr(scorer, "run", run)
    return evaluations
