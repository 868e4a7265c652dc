"""The report of a card in miniature: what each kind of kernels does, or why it cannot."""

import json
from pathlib import Path

import pytest

from benchmarks import card_report
from benchmarks.record import Ceilings
from benchmarks.shapes import SHAPES
from tests.benchmarks.shapes import small


@pytest.fixture(autouse=True)
def miniature(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SHAPES, "small", small("llada-8b"))
    monkeypatch.setattr(card_report, "measure_ceilings", lambda **_: Ceilings(1e12, 1e11))
    monkeypatch.setattr(card_report, "PROMPT", 20)
    monkeypatch.setattr(card_report, "LENGTH", 8)
    monkeypatch.setattr(card_report, "BLOCK", 4)


def report(tmp_path: Path, *kernels: str) -> dict:
    card_report.main(
        ["--shape", "small", "--layers", "2", "--rows", "16", "--out", str(tmp_path), "--kernels", *kernels]
    )
    return json.loads((tmp_path / "card.json").read_text())


@pytest.mark.slow
def test_every_kind_of_kernels_has_its_rows(tmp_path: Path):
    content = report(tmp_path, "auto", "xla")
    assert [(row["kernels"], row["what"]) for row in content["rows"]] == [
        ("auto", "tokens"), *((kernels, what) for kernels in ("auto", "xla") for what in ("step", "block"))
    ]  # fmt: skip
    assert content["rows"][0]["as_portable"]
    assert all(row["step_ms"] > 0 for row in content["rows"] if row["what"] == "step")
    assert {choice["form"] for choice in content["choices"]} <= {"xla", "padded"}


def test_what_cannot_run_has_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def tokens(kernels: str) -> list[list[int]]:
        if kernels == "triton":
            raise RuntimeError("no such instruction\nand more")
        return []

    monkeypatch.setattr(card_report, "tokens", tokens)
    content = report(tmp_path, "triton")
    assert content["rows"] == [{"kernels": "triton", "reason": "no such instruction"}]
