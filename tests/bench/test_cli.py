"""`jdllm bench serve` on the command line."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from jdllm.cli import bench
from jdllm.cli.report import Commands
from tests.bench.fake_server import BLOCK, FakeServer
from tests.helpers import ROOT

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(bench.app, name="bench")


def serve(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *args], env={"JDLLM_API_KEY": None})


def load(fake: FakeServer, *args: str) -> Result:
    shape = ["--prompt-length", "4:9", "--gen-length", "8", "--requests", "6"]
    return serve("--url", fake.url, *shape, *args)


def assert_mistake(result: Result, *words: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def cells(text: str) -> dict[str, list[str]]:
    """The lines of a table by their first column."""
    rows = [line.split("  ") for line in text.splitlines()]
    return {row[0].strip(): [cell.strip() for cell in row[1:] if cell] for row in rows}


def latencies(file: Path) -> list[float]:
    return [json.loads(line)["latency"] for line in file.read_text().splitlines()]


def test_a_table(fake: FakeServer):
    fake.fault = lambda number: "refuse" if number == 2 else None
    result = load(fake, "--concurrency", "2", "--sampling", json.dumps({"block_length": BLOCK}))
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "first, completions, streamed: 6 requests, 2 at a time"
    assert "ignore_eos" in lines[1]
    table = cells(result.stdout)
    assert table["completed"] == ["5 of 6, 1 failed"]
    assert table["generated tokens/s"][0].endswith("(prompt tokens are not counted)")
    assert table["most at once"] == ["2"]
    assert table["iterations of the server"] == ["40"]
    assert table["seconds"] == ["requests", "mean", "std", "p50", "p90", "p99"]
    assert table["time to first block"][0] == "5"
    assert lines[-1] == "1 failed: HTTP 429: the queue is full"


def test_fields_of_a_transfer_rule_are_those_of_each_request(fake: FakeServer):
    sampling = {"transfer": "lossy_speculation", "verify_policy": "span", "verify_span": 4, "seed": 7}
    assert load(fake, "--sampling", json.dumps(sampling)).exit_code == 0
    assert len(fake.bodies) == 6
    assert all(sampling.items() <= body.items() for body in fake.bodies)


def test_json_and_records_agree(fake: FakeServer, tmp_path: Path):
    out = tmp_path / "run.jsonl"
    result = load(fake, "--mode", "open", "--rate", "200", "--seed", "5", "--out", str(out), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["mode"], found["rate"], found["seed"], found["model"]) == ("open", 200, 5, "first")
    assert found["summary"]["completed"] == 6
    mean = statistics.fmean(latencies(out))
    assert found["summary"]["latency"]["mean"] == pytest.approx(mean, abs=1e-5)
    assert found["server"]["evaluated"] == 6 * 8


def test_a_trace_is_an_open_loop_with_its_own_requests(fake: FakeServer, tmp_path: Path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "run.jsonl"
    trace.write_text(
        '{"at": 0.1, "prompt_tokens": 4, "gen_length": 8}\n'
        '{"at": 0.1, "prompt_tokens": 2}\n'
        '{"at": 0.3, "prompt_tokens": 6, "gen_length": 4}\n'
    )
    args = ["--url", fake.url, "--trace", str(trace), "--gen-length", "16", "--sampling", '{"steps": 16}']
    result = serve(*args, "--out", str(out), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["mode"], found["rate"], found["trace"]) == ("open", None, str(trace))
    assert (found["requests"], found["summary"]["completed"]) == (3, 3)
    assert found["summary"]["generated_tokens"] == 8 + 16 + 4
    assert (found["summary"]["other_length"], found["summary"]["other_nfe"]) == (0, 0)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["scheduled"], r["asked_tokens"], r["steps"]) for r in records] == [
        (0.1, 8, 8),
        (0.1, 16, 16),
        (0.3, 4, 4),
    ]
    assert found["summary"]["duration"] == pytest.approx(max(r["ended"] for r in records) - 0.1, abs=1e-5)
    lines = serve(*args, "--mode", "open").stdout.splitlines()
    assert lines[0] == (f"first, completions, streamed: 3 requests, arrivals and lengths of {trace}, seed 0")
    assert lines[1].startswith("each generates 4 to 16 tokens")


def test_the_length_that_a_trace_shares_is_that_of_its_steps(fake: FakeServer, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "prompt_tokens": 4, "gen_length": 8}\n')
    result = serve("--url", fake.url, "--trace", str(trace), "--sampling", '{"steps": 8}', "--json")
    assert (json.loads(result.stdout)["gen_length"], fake.bodies[0]["steps"]) == (8, 8)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rate", "1"], ["--trace and --rate both say when requests arrive"]),
        (["--requests", "2"], ["--trace and --requests both say how many"]),
        (["--prompt-length", "4"], ["--trace and --prompt-length both say how long prompts are"]),
        (["--lengths", "lengths.json"], ["--trace and --lengths both say how long prompts are"]),
        (["--concurrency", "2"], ["--concurrency is for --mode closed"]),
        (["--mode", "closed"], ["--trace is for --mode open"]),
        (["--mode", ""], ["--mode is ''"]),
        (["--trace", "missing.jsonl"], ["missing.jsonl cannot be read"]),
        (["--sampling", '{"steps": 8}'], ["differ in 'gen_length': --gen-length says"]),
        (["--gen-length", "8", "--sampling", '{"steps": 3}'], ["line 2: 'gen_length' is 4"]),
        (["--gen-length", "8", "--sampling", '{"steps": "8"}'], ["'steps' of --sampling is '8'"]),
    ],
)
def test_a_trace_excludes_what_says_the_same(
    args: list[str], words: list[str], fake: FakeServer, tmp_path: Path
):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "prompt_tokens": 4}\n{"at": 0, "prompt_tokens": 4, "gen_length": 4}\n')
    assert_mistake(serve("--url", fake.url, "--trace", str(trace), *args), *words)
    assert fake.bodies == []


def test_the_key_comes_from_the_environment_and_is_not_told(fake: FakeServer):
    fake.key = "s3cret"
    args = ["bench", "serve", "--url", fake.url, "--requests", "1", "--json"]
    result = CliRunner().invoke(app, args, env={"JDLLM_API_KEY": "s3cret"})
    assert (result.exit_code, fake.authorizations) == (0, ["Bearer s3cret"])
    assert "s3cret" not in result.stdout


def test_lengths_of_a_file_with_its_steps_and_blocks(fake: FakeServer, tmp_path: Path):
    file = tmp_path / "lengths.json"
    file.write_text('{"prompt_lengths": [5, 3], "gen_length": 8, "steps": 4, "block_length": 4}')
    args = ["--url", fake.url, "--lengths", str(file), "--concurrency", "1", "--no-stream"]
    assert serve(*args).exit_code == 0
    assert serve(*args, "--requests", "3", "--gen-length", "16", "--sampling", '{"steps": 8}').exit_code == 0
    asked = [
        (len(body["prompt"]), body["max_tokens"], body["steps"], body["block_length"]) for body in fake.bodies
    ]
    assert asked == [(5, 8, 4, 4), (3, 8, 4, 4), (5, 16, 8, 4), (3, 16, 8, 4), (5, 16, 8, 4)]


def test_other_forward_evaluations_than_steps_are_remarked(fake: FakeServer):
    result = load(fake, "--sampling", '{"steps": 5}')
    assert "6 took another number of forward evaluations than their steps" in result.stdout


def test_a_load_of_which_nothing_completes_fails(fake: FakeServer, tmp_path: Path):
    fake.fault = lambda _: "refuse"
    out = tmp_path / "run.jsonl"
    result = load(fake, "--out", str(out))
    assert result.exit_code == 1
    assert result.stdout.endswith("\n\n6 failed: HTTP 429: the queue is full\n")
    assert "\n\n\n" not in result.stdout
    assert len(out.read_text().splitlines()) == 6


def test_two_runs_are_compared(fake: FakeServer, tmp_path: Path):
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    fake.block_seconds = 0.1
    load(fake, "--out", files[0])
    fake.block_seconds = 0.01
    load(fake, "--out", files[1])
    result = serve("--compare", *files)
    assert result.exit_code == 0
    a, b = (statistics.median(latencies(Path(file))) for file in files)
    assert a > b
    assert cells(result.stdout)["latency, p50 (s)"] == [f"{a:.3f}", f"{b:.3f}", f"{b / a - 1:+.1%}"]
    found = json.loads(serve("--compare", *files, "--json").stdout)
    assert found["ratios"]["latency, p50 (s)"] == pytest.approx(b / a)
    assert found["same_requests"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--mode", "open"], ["--rate"]),
        (["--mode", "open", "--rate", "0"], ["--rate"]),
        (["--mode", "open", "--rate", "nan"], ["--rate"]),
        (["--mode", "open", "--rate", "1", "--concurrency", "2"], ["--concurrency"]),
        (["--rate", "1"], ["--rate", "--mode open"]),
        (["--mode", "half"], ["'half'", "closed or open"]),
        (["--endpoint", "infill"], ["'infill'", "completions or chat"]),
        (["--stream-mode", "words"], ["'words'", "text or denoise"]),
        (["--sampling", "{"], ["--sampling is not JSON"]),
        (["--sampling", "[]"], ["--sampling is []"]),
        (["--sampling", '{"max_tokens": 4}'], ["--sampling", "'max_tokens'"]),
        (["--lengths", "missing.json"], ["missing.json cannot be read"]),
        (["--lengths", "missing.json", "--prompt-length", "4"], ["--prompt-length"]),
        (["--prompt-length", "many"], ["--prompt-length is 'many'"]),
        (["--out", "missing/run.jsonl"], ["missing/run.jsonl cannot be written"]),
        (["--compare", "missing.jsonl", "other.jsonl"], ["missing.jsonl cannot be read"]),
        (["--requests", "0"], ["--requests"]),
    ],
)
def test_mistakes_are_one_line(args: list[str], words: list[str], fake: FakeServer):
    assert_mistake(serve("--url", fake.url, *args), *words)
    assert fake.bodies == []


def test_no_server_is_one_line():
    assert_mistake(serve("--url", "http://127.0.0.1:1"), "there is no server at http://127.0.0.1:1")


def test_without_an_http_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    for name in ("httpx", "jdllm.bench.run", "jdllm.bench.client", "jdllm.bench.load"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delattr("jdllm.bench.run", raising=False)
    assert_mistake(serve(), "needs httpx", "'serve'")


def test_a_client_loads_no_jax():
    code = "import sys, jdllm.cli.bench, jdllm.bench.run; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_an_interrupt_prints_what_there_is(fake: FakeServer, tmp_path: Path):
    fake.block_seconds = 0.1
    out = tmp_path / "run.jsonl"
    # Who runs in the background may have been told to ignore it, which a process inherits.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heard}; from tests.bench.test_cli import app; app()"
    load = ["--requests", "1000", "--concurrency", "2", "--gen-length", "8"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "bench", "serve", "--url", fake.url, *load, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JDLLM_API_KEY": ""},
    )
    deadline = time.monotonic() + 60
    while len(fake.bodies) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "")
    assert "interrupted: this is what there is" in stdout
    statuses = [json.loads(line)["status"] for line in out.read_text().splitlines()]
    assert statuses.count("completed") >= 4
    assert statuses.count("cancelled") <= 2
    assert set(statuses) == {"completed", "cancelled"}
