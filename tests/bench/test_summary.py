"""Summaries of records against NumPy's arithmetic, and files of records."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.bench.records import Record, check_writable, read_records, write_records
from jdllm.bench.report import compare, describe_comparison
from jdllm.bench.summary import percentile, summarize
from jdllm.errors import RequestError


def record(index: int, latency: float = 1.0, **others: Any) -> Record:
    values: dict[str, Any] = {
        "index": index,
        "scheduled": float(index),
        "sent": float(index),
        "ended": index + latency,
        "prompt_tokens": 100,
        "asked_tokens": 8,
        "completion_tokens": 8,
        "status": "completed",
        "error": None,
        "latency": latency,
        "time_to_first_text": latency / 4,
        "time_to_first_block": latency / 2,
        "finish_reason": "length",
        "nfe": 4,
        "steps": 4,
    }
    return Record(**(values | others))


def failed(index: int, error: str = "HTTP 429: full", **others: Any) -> Record:
    none: dict[str, Any] = dict.fromkeys(
        ("time_to_first_text", "time_to_first_block", "finish_reason", "nfe")
    )
    return record(index, status="failed", error=error, completion_tokens=0, **(none | others))


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=50),
    st.sampled_from([0, 1, 50, 90, 99, 99.9, 100]),
)
def test_percentiles_are_numpys(values: list[float], percent: float):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


def test_spreads_are_numpys():
    latencies = np.random.default_rng(0).exponential(size=101)
    summary = summarize([record(i, latency) for i, latency in enumerate(latencies.tolist())])
    assert summary.latency is not None
    assert summary.time_to_first_block is not None
    expected = [latencies.mean(), latencies.std(ddof=1), *np.percentile(latencies, [50, 90, 99])]
    assert list(summary.latency) == pytest.approx([101, *expected])
    assert list(summary.time_to_first_block) == pytest.approx([101, *(value / 2 for value in expected)])
    first, second = latencies[:50].mean(), latencies[50:].mean()
    assert summary.halves == pytest.approx((first, second))


def test_rates_count_what_was_generated_over_the_whole_time():
    records = [record(0, 4.0), record(1, 2.0), record(2, 3.0, completion_tokens=6), failed(3, ended=7.0)]
    summary = summarize([records[2], *records[:2], records[3]])
    assert (summary.requests, summary.completed, summary.failed, summary.cancelled) == (4, 3, 1, 0)
    assert summary.duration == 7.0
    assert summary.request_throughput == pytest.approx(3 / 7)
    assert (summary.prompt_tokens, summary.generated_tokens) == (300, 22)
    assert summary.generated_tokens_per_second == pytest.approx(22 / 7)
    assert (summary.nfe, summary.other_length, summary.other_nfe) == (12, 1, 0)


def test_failures_are_counted_by_message_and_have_no_latency():
    records = [record(0, 1.0), failed(1), failed(2, "ReadError"), failed(3, latency=99.0)]
    records.append(record(4, 50.0, status="cancelled"))
    summary = summarize(records)
    assert summary.errors == {"HTTP 429: full": 2, "ReadError": 1}
    assert (summary.failed, summary.cancelled) == (3, 1)
    assert summary.latency is not None
    assert summary.latency == (1, 1.0, 0.0, 1.0, 1.0, 1.0)


def test_times_are_those_of_the_requests_that_told():
    summary = summarize([record(0), record(1, time_to_first_text=None), record(2, time_to_first_text=3.0)])
    assert summary.time_to_first_text is not None
    assert summary.time_to_first_text[:2] == (2, (0.25 + 3.0) / 2)


def test_a_run_of_failures_has_no_latency():
    summary = summarize([failed(0), failed(1)])
    assert (summary.latency, summary.time_to_first_text, summary.halves) == (None, None, (None, None))
    assert summary.generated_tokens_per_second == 0


def test_other_forward_evaluations_than_steps_are_counted():
    records = [record(0), record(1, nfe=5), record(2, steps=None, nfe=9), record(3, nfe=None)]
    assert summarize(records).other_nfe == 1


def test_most_at_once():
    times = [(0, 4), (1, 2), (2, 3), (2.5, 6), (4, 5)]
    records = [record(i, sent=float(a), ended=float(b)) for i, (a, b) in enumerate(times)]
    assert summarize(records).max_concurrency == 3


def test_the_longest_delay_of_the_client_is_told():
    records = [record(0, sent=0.25), record(1), record(2, sent=2.125)]
    assert summarize(records).send_delay == 0.25


def test_records_come_back_from_a_file_in_order(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    records = [record(1), failed(0), record(2, 1 / 3)]
    write_records(path, records)
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1, 2]
    back = read_records(path)
    assert back[0] == records[1]
    assert back[1] == records[0]
    assert back[2].latency == pytest.approx(1 / 3, abs=1e-6)
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_file_that_is_no_run_is_refused(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    write_records(path, [record(0)])
    good = path.read_text()
    cases = {
        good + "{\n": "line 2",
        good.replace('"completed"', '"won"'): "line 1 .* status",
        good.replace('"index": 0, ', ""): "line 1 .* index",
        "": "has no records",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(RequestError, match=message):
            read_records(path)
    with pytest.raises(RequestError, match=r"missing\.jsonl cannot be read"):
        read_records(tmp_path / "missing.jsonl")


def test_a_place_that_cannot_be_written_is_refused_beforehand(tmp_path: Path):
    check_writable(tmp_path / "run.jsonl")
    for path in (tmp_path, tmp_path / "missing" / "run.jsonl"):
        with pytest.raises(RequestError, match="cannot be written"):
            check_writable(path)


def test_a_comparison_has_both_runs_and_their_ratios():
    slow = [record(i, 2.0) for i in range(4)]
    fast = [record(i, 1.0, nfe=2) for i in range(4)]
    found = compare(slow, fast)
    assert (found["a"]["latency"]["p50"], found["b"]["latency"]["p50"]) == (2.0, 1.0)
    assert found["ratios"]["latency, p50 (s)"] == 0.5
    assert found["ratios"]["forward evaluations"] == 0.5
    assert found["ratios"]["duration (s)"] == pytest.approx(4 / 5)
    assert "failed" not in found["ratios"]
    assert found["same_requests"] is True
    lines = describe_comparison(slow, fast, ("a.jsonl", "b.jsonl")).splitlines()
    (row,) = [line for line in lines if line.startswith("latency, p99")]
    assert row.split()[-3:] == ["2.000", "1.000", "-50.0%"]
    assert "did not ask" not in "\n".join(lines)


def test_a_comparison_of_other_requests_says_so():
    one = [record(0), record(1)]
    assert not compare(one, one[:1])["same_requests"]
    assert not compare(one, [record(0), record(1, asked_tokens=9)])["same_requests"]
    assert not compare(one, [record(0), record(1, prompt_tokens=9)])["same_requests"]
    assert compare(one, [record(0), failed(1, prompt_tokens=9)])["same_requests"]
    longer = [dataclasses.replace(r, prompt_tokens=7) for r in one]  # type: ignore[type-var]
    assert "did not ask for the same" in describe_comparison(one, longer, ("a", "b"))


def test_a_comparison_with_a_run_that_only_failed():
    lines = describe_comparison([record(0)], [failed(0)], ("a", "b")).splitlines()
    (row,) = [line for line in lines if line.startswith("latency, mean (s)")]
    assert row.split()[-3:] == ["1.000", "-", "-"]
