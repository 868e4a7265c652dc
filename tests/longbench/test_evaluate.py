"""Figures of a dataset: means, ranges of length, and the table."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jdllm.longbench.evaluate import DatasetResult, average, evaluate, render_table
from jdllm.longbench.samples import Sample, read_samples
from jdllm.longbench.templates import BENCHMARKS
from tests.longbench.lines import CASES, line, write

ALL = [(benchmark, dataset) for benchmark, datasets in BENCHMARKS.items() for dataset in datasets]


def fox(length: int | None = None, task: str = "hotpotqa") -> Sample:
    return Sample("", "context", "query", ("red fox",), task, (), length)


@pytest.mark.parametrize(("benchmark", "dataset"), ALL)
def test_a_right_answer_scores_full_marks_in_every_dataset(benchmark: str, dataset: str, tmp_path: Path):
    path = write(tmp_path / f"{dataset}.jsonl", line(benchmark, dataset), line(benchmark, dataset))
    samples = read_samples([path], benchmark)[dataset]
    right = CASES[benchmark][dataset].right

    def generate(asked: Sequence[Sample], max_new_tokens: int) -> list[str]:
        assert asked == samples
        assert max_new_tokens == BENCHMARKS[benchmark][dataset].max_new_tokens
        return [right, ""]

    result = evaluate(benchmark, samples, generate)
    assert (result.dataset, result.samples, result.score) == (dataset, 2, 50.0)


def test_scores_are_means_in_percent_by_ranges_of_length():
    samples = [fox(3999), fox(4000), fox(7999), fox(8000), fox(100_000), fox(1)]
    answers = ["red fox", "fox", "wolf", "wolf", "red fox", "wolf"]
    result = evaluate("longbench", samples, lambda *_: answers)
    assert result.score == 44.44  # (1 + 2/3 + 0 + 0 + 1 + 0) / 6
    assert result.by_length == {"0-4k": 50.0, "4-8k": 33.33, "8k+": 50.0}


def test_ranges_without_samples_have_no_score_and_samples_without_length_no_range():
    result = evaluate("longbench", [fox(10), fox()], lambda *_: ["red fox", "wolf"])
    assert result.score == 50.0
    assert result.by_length == {"0-4k": 100.0, "4-8k": None, "8k+": None}
    assert evaluate("longbench", [fox()], lambda *_: ["fox"]).by_length is None


def test_seconds_are_those_of_the_generation(monkeypatch: pytest.MonkeyPatch):
    now = 5.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def generate(*_: object) -> list[str]:
        nonlocal now
        now += 2.5
        return ["fox"]

    assert evaluate("longbench", [fox()], generate).seconds == 2.5


def test_an_answer_is_missed():
    with pytest.raises(ValueError, match="zip"):
        evaluate("longbench", [fox(), fox()], lambda *_: ["fox"])


def test_the_average_counts_each_dataset_once():
    results = [DatasetResult("a", "m", 1000, 10.0, 1.0), DatasetResult("b", "m", 1, 20.51, 1.0)]
    assert average([*results, results[1]]) == 17.01  # 51.02 / 3


def test_the_table():
    lengths = {"0-4k": 50.0, "4-8k": None, "8k+": 100.0}
    rows = [
        DatasetResult("qasper", "qa_f1", 200, 66.67, 12.345, lengths),
        DatasetResult("lcc", "code_similarity", 5, 7.5, 1.0),
    ]
    assert render_table(rows).splitlines() == [
        "dataset  metric           samples  score   0-4k  4-8k     8k+  seconds",
        "qasper   qa_f1                200  66.67  50.00     -  100.00    12.35",
        "lcc      code_similarity        5   7.50      -     -       -     1.00",
        "average                       205  37.09                         13.35",
    ]
    assert render_table([DatasetResult("passkey", "first_number", 2, 100.0, 1.0)]).splitlines() == [
        "dataset  metric        samples   score  seconds",
        "passkey  first_number        2  100.00     1.00",
    ]
