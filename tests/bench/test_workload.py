"""Lengths, prompts and arrivals."""

import json
import math
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jdllm.bench.workload import draw_prompts, parse_lengths, poisson_arrivals, read_workload, steps_of
from jdllm.errors import RequestError
from tests.helpers import ROOT

COUNT = 4000


def drawn(text: str, count: int = COUNT) -> list[int]:
    return parse_lengths(text)(np.random.default_rng(0), count)


def test_poisson_arrivals_have_exponential_gaps():
    arrivals = poisson_arrivals(2.5, COUNT, seed=0)
    gaps = sorted(np.diff([0, *arrivals]))
    assert gaps[0] > 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 2.5, rel=3 / math.sqrt(COUNT))
    expected = [1 - math.exp(-2.5 * gap) for gap in gaps]
    distance = max(max(abs(f - i / COUNT), abs(f - (i + 1) / COUNT)) for i, f in enumerate(expected))
    assert distance < 1.63 / math.sqrt(COUNT)  # Kolmogorov and Smirnov, at one percent


def test_the_numbers_of_arrivals_in_seconds_are_poisson():
    arrivals = poisson_arrivals(4.0, COUNT, seed=1)
    whole = int(arrivals[-1])
    counts = Counter(int(at) for at in arrivals if at < whole)
    numbers = [counts[second] for second in range(whole)]
    assert statistics.variance(numbers) == pytest.approx(4.0, rel=0.15)


def test_arrivals_come_from_the_seed_alone():
    first = poisson_arrivals(2.0, 50, seed=3)
    assert poisson_arrivals(2.0, 50, seed=3) == first
    assert poisson_arrivals(2.0, 50, seed=4) != first
    assert poisson_arrivals(4.0, 50, seed=3) == pytest.approx([at / 2 for at in first])


def test_a_single_length():
    assert drawn("512", 3) == [512, 512, 512]


def test_a_range_of_lengths_is_uniform_and_has_both_ends():
    counts = Counter(drawn("3:7"))
    assert sorted(counts) == [3, 4, 5, 6, 7]
    assert all(count == pytest.approx(COUNT / 5, rel=0.1) for count in counts.values())


def test_lognormal_lengths_have_the_mean_that_was_asked_for():
    lengths = drawn("lognormal:400:0.5")
    assert statistics.fmean(lengths) == pytest.approx(400, rel=0.03)
    assert statistics.stdev(map(math.log, lengths)) == pytest.approx(0.5, rel=0.05)
    assert min(drawn("lognormal:1:3")) == 1


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "7:3", "0:3", "1:2:3", "a", "1.5", "lognormal:0:1", "lognormal:9", "99999999", "²"],
)
def test_what_is_no_length_is_refused(text: str):
    with pytest.raises(RequestError, match="--prompt-length is"):
        parse_lengths(text)


def test_prompts_are_of_the_lower_half_without_the_ids_that_mean_something():
    prompts = draw_prompts(parse_lengths("50"), 100, 21, frozenset({3, 7, 15}), seed=0)
    assert {len(prompt) for prompt in prompts} == {50}
    assert {i for prompt in prompts for i in prompt} == {0, 1, 2, 4, 5, 6, 8, 9}
    with pytest.raises(RequestError, match="vocabulary of 2 ids"):
        draw_prompts(parse_lengths("5"), 1, 2, frozenset({0}), seed=0)


def test_prompts_do_not_depend_on_how_many_follow():
    def prompts(count: int, seed: int) -> list[list[int]]:
        return draw_prompts(parse_lengths("5:50"), count, 1000, frozenset(), seed)

    assert prompts(20, 0)[:10] == prompts(10, 0)
    assert prompts(10, 1) != prompts(10, 0)
    assert len({tuple(prompt) for prompt in prompts(20, 0)}) == 20


def test_the_recorded_workload_is_cycled():
    path = ROOT / "benchmarks/workloads/ragged32.json"
    listed = json.loads(path.read_text())["prompt_lengths"]
    workload = read_workload(path)
    assert (workload.count, workload.gen_length) == (32, 256)
    assert workload.sampling == {"steps": 256, "block_length": 32}
    assert workload.lengths(np.random.default_rng(0), 40) == [*listed, *listed[:8]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt_lengths": []}', "no list 'prompt_lengths'"),
        ('{"prompt_lengths": [4, 0]}', r"prompt_lengths\[1\] of .* is 0"),
        ('{"prompt_lengths": [true]}', r"prompt_lengths\[0\] of .* is True"),
        ('{"prompt_lengths": [99999999]}', "at most"),
        ('{"prompt_lengths": [4], "gen_length": "8"}', "'gen_length' of .* is '8'"),
        ("[4]", "expected a JSON object"),
    ],
)
def test_a_workload_that_is_none_is_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_workload(path)


@pytest.mark.parametrize(
    ("sampling", "steps"),
    [
        ({}, None),
        ({"steps": 64}, 64),
        ({"steps": 64, "transfer": "margin", "cache": "dual"}, 64),
        ({"steps": 64, "alg": "entropy"}, 64),
        ({"steps": 64, "transfer": "threshold"}, None),
        ({"steps": 64, "alg": "confidence_threshold"}, None),
    ],
)
def test_steps_count_where_the_rule_takes_them_all(sampling: dict[str, object], steps: int | None):
    assert steps_of(sampling) == steps
