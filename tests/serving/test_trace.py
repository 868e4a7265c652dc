"""The file that tells what an engine did."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jdllm import LLM
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError, ConfigError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.engine import Engine
from jdllm.serving.trace import Trace
from jdllm.serving.updates import PartDone
from tests.engines import engine_of, finish, generation_request

MICROSECONDS = 1e6
ROUNDING = 0.1


@pytest.fixture
def engine(params: Params, config: ModelConfig, executables: Executables, tmp_path: Path) -> Engine:
    engine = engine_of(params, config, executables, 128)
    engine.trace = Trace(tmp_path / "trace.json")
    return engine


def some(config: ModelConfig, lengths: list[int], **options: Any) -> list[Any]:
    sampling = SamplingParams(gen_length=8, block_length=4, early_stop=False, **options)
    return [generation_request(i, np.arange(1, n + 1), sampling, config) for i, n in enumerate(lengths)]


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Spans by process, and all instants."""
    events = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"]]].append(event)
        elif event["ph"] == "i":
            found["instants"].append(event)
    return found


def test_parts_are_those_that_the_engine_tells(engine: Engine, config: ModelConfig, tmp_path: Path):
    parts: list[PartDone] = []
    engine.observe = parts.append
    finish(engine, some(config, [5, 9], cache="dual"), updates="every")
    engine.close()
    found = read(tmp_path / "trace.json")
    device = found["device"]
    assert [(e["name"], e["args"]["rows"], e["args"]["padding"], e["args"]["requests"]) for e in device] == [
        (part.kind.name.lower(), part.rows, part.padding, part.requests) for part in parts
    ]
    assert [e["dur"] for e in device] == pytest.approx([MICROSECONDS * part.busy for part in parts])
    for before, after in pairwise(device):
        assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING
    packed, taken = ([e for e in found["host"] if e["tid"] == line] for line in (0, 1))
    assert len(packed) == len(taken) == len(parts)
    for span, waited, part in zip(packed, taken, parts, strict=True):
        assert span["ts"] + span["dur"] <= waited["ts"]
        assert waited["dur"] == pytest.approx(MICROSECONDS * (part.times.collected - part.times.ended))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_waits_or_is_served_from_its_arrival_to_its_end(
    engine: Engine, config: ModelConfig, tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also where its next step is submitted while the present one runs."""
    if ahead:
        engine.scheduler.share()
        monkeypatch.setattr("jdllm.serving.scheduler.HOST_SECONDS", 0.0)
    _, states = finish(engine, some(config, [5, 9, 7], cache="dual"), updates="every")
    engine.close()
    found = read(tmp_path / "trace.json")
    lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for span in found["requests"]:
        lines[span["tid"]].append(span)
    assert len(lines) == 3
    for spans, state in zip(lines.values(), states, strict=True):
        said = {"prompt_tokens": len(state.prompt), "tokens": len(state.prompt) + 8, "blocks": 2}
        assert spans[0]["args"] == said | {"id": spans[1]["args"]["id"]}
        assert len({span["args"]["id"] for span in spans}) == 1
        assert [span["name"] for span in spans[:3]] == ["waits for a start", "waits for refresh", "refresh"]
        names = [span["name"] for span in spans]
        assert names.count("reuse") == 2 * 3
        assert ("waits for reuse" in names) != ahead
        for before, after in pairwise(spans):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=ROUNDING)
        spent = MICROSECONDS * state.timings().total
        assert sum(span["dur"] for span in spans) == pytest.approx(spent, rel=0.1, abs=2000)
    assert [e["name"] for e in found["instants"]] == ["finished"] * 3 + ["closed"]


def test_lines_are_used_again(engine: Engine, config: ModelConfig, tmp_path: Path):
    for _ in range(3):
        finish(engine, some(config, [5]))
    engine.add(some(config, [5])[0].spec)
    engine.close()
    found = read(tmp_path / "trace.json")
    assert {span["tid"] for span in found["requests"]} == {0}
    assert [e["name"] for e in found["instants"]] == ["finished"] * 3 + ["aborted", "closed"]


def test_who_leaves_while_a_part_runs_has_no_line_any_more(
    engine: Engine, config: ModelConfig, tmp_path: Path
):
    """A step collects one of two parts: the other still runs when its request is aborted."""
    for _ in range(3):
        [plain], [cached] = some(config, [5]), some(config, [9], cache="dual")
        requests = [engine.add(one.spec, updates="every") for one in (plain, cached)]
        engine.step()
        for request in requests:
            engine.abort(request)
        while not engine.idle:
            engine.step()
        engine.step()
    engine.close()
    found = read(tmp_path / "trace.json")
    assert {span["tid"] for span in found["requests"]} <= {0, 1}


def test_a_file_that_cannot_be_written_is_a_mistake(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"trace is '.*nowhere/t.json', which cannot be written: No such file"
    ):
        LLM("model", trace=tmp_path / "nowhere" / "t.json")


def test_nothing_is_left_of_a_model_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "nothing"), trace=tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()
