"""Loads on a server: what they ask of `jdllm bench serve`, and the rows and capacities that they come to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.record import RESULTS
from benchmarks.serving import put_load, served
from benchmarks.serving_loads import LOADS, Load, arriving, capacities
from jdllm.cli import bench
from jdllm.cli.report import Commands
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from tests.bench.fake_server import BLOCK, FakeServer, serving

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(bench.app, name="bench")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving() as server:
        yield server


@pytest.mark.parametrize("name", LOADS)
def test_bench_serve_takes_every_load(name: str):
    """What is wrong with options is told before a server is asked."""
    load = LOADS[name]
    command = ["bench", "serve", "--url", "http://127.0.0.1:1", *load.arguments]
    result = CliRunner().invoke(app, command)
    assert result.stderr.startswith("error: there is no server at http://127.0.0.1:1")
    assert load.open == ("--rate" in load.arguments or "--trace" in load.arguments)


def test_the_sweep_has_the_rates_of_the_published_one():
    sweep = {name: load for name, load in LOADS.items() if name.startswith("poisson_")}
    assert [load.rate for load in sweep.values()] == [0.25, 0.5, 1.0, 1.5, 2.0, 2.5]
    for name, load in sweep.items():
        assert name == f"poisson_{load.rate}"
        assert load.requests is not None
        assert 60 <= load.requests <= 200
        assert load.lengths == "mixed"


@pytest.mark.parametrize(("cache", "shares"), [("dual", {}), ("sparse", {"retention": 0.5})])
def test_loads_with_other_caches_differ_by_the_cache_alone(cache: str, shares: dict[str, float]):
    for own, other in ((f"{cache}_1.5", "poisson_1.5"), (f"{cache}_32", "delay_0")):
        load, beside = LOADS[own], LOADS[other]
        assert sorted(load.arguments) == sorted(beside.arguments)
        assert load.sampling == {"cache": cache, "refresh_delay": 0, **shares}
        assert beside.sampling == {"cache": "head_sparse", "refresh_delay": 0, "retention": 0.5}
        assert load.name == f"{beside.name}, {cache}"
        SamplingParams(gen_length=256, block_length=32, steps=256, **load.sampling)


def test_other_caches_at_a_rate_are_no_part_of_a_sweep():
    rows = [(arriving(0.5, 60), row(1.0, 1.0)), (LOADS["dual_1.5"], row(1.0, 1.0))]
    assert capacities(rows) == {}


def row_of_trace(fake: FakeServer, directory: Path) -> dict[str, Any]:
    trace = directory / "trace.jsonl"
    trace.write_text(
        '{"at": 0, "prompt_tokens": 5}\n'
        '{"at": 0.5, "prompt_tokens": 3, "gen_length": 16}\n'
        '{"at": 0.5, "prompt_tokens": 4}\n'
    )
    return put_load(fake.url, Load("three", {"block_length": BLOCK}, None, (), trace=trace), 8)


def test_a_row_of_a_trace(fake: FakeServer, tmp_path: Path):
    fake.block_seconds = 0.02
    row = row_of_trace(fake, tmp_path)
    assert (row["load"], row["requests"], row["completed"]) == ("three", 3, 3)
    assert (row["failed"], row["other_length"], row["other_nfe"]) == (0, 0, 0)
    assert 0.5 + 4 * 0.02 <= row["seconds"] < 3
    assert row["tokens_s"] * row["seconds"] == pytest.approx(8 + 16 + 8)
    assert row["latency_std_s"] > 0
    assert row["time_to_first_block_std_s"] >= 0
    assert sorted((len(b["prompt"]), b["max_tokens"], b["steps"]) for b in fake.bodies) == [
        (3, 16, 16),
        (4, 8, 8),
        (5, 8, 8),
    ]


def test_a_row_has_all_columns_of_the_records(fake: FakeServer, tmp_path: Path):
    (recorded, *_) = json.loads((RESULTS / "serving_llada-8b_arrivals.json").read_text())["rows"]
    row = {"shape": "llada-8b", "through": "HTTP"} | row_of_trace(fake, tmp_path)
    assert row.keys() == recorded.keys()


def row(first: float | None, second: float | None, completed: int = 60) -> dict[str, Any]:
    return {"requests": 60, "completed": completed, "first_half_s": first, "second_half_s": second}


def test_the_capacity_is_the_highest_stable_rate():
    rows = {0.5: row(2.0, 2.7), 1.0: row(2.0, 2.5), 2.0: row(2.0, 2.6), 2.5: row(2.0, 2.61)}
    assert capacities((arriving(rate, 60), rows[rate]) for rate in (2.0, 0.5, 2.5, 1.0)) == {"mixed": 2.0}


def test_a_rate_with_failures_is_beyond_the_capacity():
    rows = {0.5: row(2.0, 2.0), 1.0: row(2.0, 2.0, completed=59), 2.0: row(2.0, None, completed=30)}
    assert capacities((arriving(rate, 60), row) for rate, row in rows.items()) == {"mixed": 0.5}
    assert capacities((arriving(rate, 60), rows[rate]) for rate in (1.0, 2.0)) == {"mixed": None}


def test_a_capacity_needs_several_rates_of_the_same_lengths():
    at_once = Load("32 at once", {}, 32, ())
    burst = LOADS["burst"]
    rows = [(load, row(1.0, 1.0)) for load in (at_once, burst, arriving(1.0, 60), arriving(1.0, 60, "short"))]
    assert capacities(rows) == {}
    assert capacities([*rows, (arriving(0.5, 60, "short"), row(1.0, 1.0))]) == {"short": 1.0}


def test_a_server_answers_inside_and_has_ended_outside(tmp_path: Path):
    with served(checkpoint_path(), 512, tmp_path, ["--trace", str(tmp_path / "trace.json")]) as server:
        assert server["rows"] == 512
        assert server["start_s"] > 0
        body = {"prompt": "12+5=", "max_tokens": 8, "seed": 1}
        assert httpx.post(f"{server['url']}/v1/completions", json=body, timeout=60).status_code == 200
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events if event["ph"] == "i"] == ["finished", "closed"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server['url']}/health")
