"""Samples asked and scored, a dataset at a time, and the report."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from jdllm.longbench.infinitebench import infinitebench_score
from jdllm.longbench.samples import Sample
from jdllm.longbench.scores import longbench_score
from jdllm.longbench.templates import BENCHMARKS

Generate = Callable[[Sequence[Sample], int], list[str]]
"""Answers samples of one dataset, with that many new tokens each at most."""

_SCORES = {"longbench": longbench_score, "infinitebench": infinitebench_score}
_LENGTHS = {"0-4k": 4000, "4-8k": 8000, "8k+": math.inf}
"""LongBench-E's ranges of length by name, with their ends."""


@dataclasses.dataclass(frozen=True)
class DatasetResult:
    """Figures of one dataset.

    - `metric`: the name of its score.
    - `samples`: how many were asked.
    - `score`: mean over them, times 100, rounded to two places.
    - `seconds`: wall time of the generation, compilation included.
    - `by_length`: the score of the samples in each range of LongBench-E, `None` for a range without any; of
      LongBench's samples that tell their length.
    """

    dataset: str
    metric: str
    samples: int
    score: float
    seconds: float
    by_length: dict[str, float | None] | None = None


def evaluate(benchmark: str, samples: Sequence[Sample], generate: Generate) -> DatasetResult:
    """Ask the samples of one dataset, and score the answers as published.

    Arguments:
    - `benchmark`: "longbench" or "infinitebench".
    - `samples`: at least one, all of the same dataset.
    - `generate`: the model; called once.
    """
    dataset = BENCHMARKS[benchmark][samples[0].task]
    start = time.perf_counter()
    predictions = generate(samples, dataset.max_new_tokens)
    seconds = time.perf_counter() - start
    score = _SCORES[benchmark]
    scores = [score(text, sample) for text, sample in zip(predictions, samples, strict=True)]
    by_length = _by_length(samples, scores) if benchmark == "longbench" else None
    return DatasetResult(samples[0].task, dataset.metric, len(samples), _percent(scores), seconds, by_length)


def average(results: Sequence[DatasetResult]) -> float:
    """The mean of the datasets' scores, each counted once, rounded to two places."""
    return round(sum(result.score for result in results) / len(results), 2)


def render_table(results: Sequence[DatasetResult]) -> str:
    """The results as an aligned text table, with their average where there are several."""
    ranges = list(_LENGTHS) if any(result.by_length for result in results) else []
    rows = [["dataset", "metric", "samples", "score", *ranges, "seconds"]]
    for result in results:
        lengths = [_cell((result.by_length or {}).get(name)) for name in ranges]
        figures = [str(result.samples), _cell(result.score), *lengths, _cell(result.seconds)]
        rows.append([result.dataset, result.metric, *figures])
    if len(results) > 1:
        total = str(sum(result.samples for result in results))
        seconds = _cell(sum(result.seconds for result in results))
        rows.append(["average", "", total, _cell(average(results)), *([""] * len(ranges)), seconds])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        names = [cell.ljust(width) for cell, width in zip(cells[:2], widths, strict=False)]
        return "  ".join([*names, *padded[2:]])

    return "\n".join(map(line, rows))


def _by_length(samples: Sequence[Sample], scores: Sequence[float]) -> dict[str, float | None] | None:
    ranges: dict[str, list[float]] = {name: [] for name in _LENGTHS}
    for sample, score in zip(samples, scores, strict=True):
        if sample.length is not None:
            ranges[next(name for name, end in _LENGTHS.items() if sample.length < end)].append(score)
    if not any(ranges.values()):
        return None
    return {name: _percent(found) if found else None for name, found in ranges.items()}


def _percent(scores: Sequence[float]) -> float:
    return round(100 * sum(scores) / len(scores), 2)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
