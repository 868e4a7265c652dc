"""Single settings of long contexts: what counts, what is compared, and a run of the benchmark."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.quality.lost_in_the_middle import Found
from benchmarks.quality.prefilling_cells import BASE, SETTINGS, holds, in_order, main, row
from benchmarks.quality.prefilling_tables import compared, table
from benchmarks.tables import record_parts
from jdllm.decoding.prefilling import Prefilling
from jdllm.demo.long_tasks import Fact
from jdllm.prefilling.prefilled import Prefilled

FIRST, SECOND = SETTINGS[:2]


def found(right: list[list[bool]]) -> Found:
    return Found(np.array(right), np.ones_like(right, bool), 1.5)


def test_every_setting_is_another_one():
    assert FIRST.prefilling == BASE
    ways = [setting.prefilling for setting in SETTINGS]
    assert all(way not in ways[:place] for place, way in enumerate(ways))
    assert len({(setting.part, setting.value) for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize(
    ("chunk_bos", "kept", "held"),
    [
        (True, [0, 4, 5, 6], True),  # "def" of "abcdefg" behind a token of its own
        (True, [0, 3, 4, 5], False),
        (True, [4, 5], False),
        (False, [3, 4, 5], True),
        (False, [0, 4, 5, 6], False),
        (False, [[[3, 4], [4, 5]]], True),  # of two heads
        (False, [[[3, 4], [3, 4]]], False),
    ],
)
def test_a_fact_is_held_where_all_its_tokens_are_kept(chunk_bos: bool, kept: list[Any], held: bool):
    fact = Fact(103, 106, "", "")
    prefilled = Prefilled(kept=[np.arange(8), np.array(kept)], spans=[(0, 8), (100, 107)])
    assert holds(prefilled, fact, Prefilling(chunk_bos=chunk_bos)) == held
    assert not holds(Prefilled(), fact, Prefilling())


def test_settings_are_compared_by_texts():
    base = row("pairs", FIRST, 512, found([[True, True], [True, False], [False, False]]))
    other = row("pairs", SECOND, 512, found([[True, False], [False, False], [False, False]]))
    pair = compared(other, base)
    assert pair is not None
    expected = stats.t.interval(0.95, 2, loc=-1 / 3, scale=stats.sem([-0.5, -0.5, 0.0]))
    assert (pair["low"], pair["high"]) == pytest.approx(expected)
    assert pair["difference"] == pytest.approx(-1 / 3)
    assert pair["verdict"] == "no difference shown"
    worse = row("pairs", SECOND, 512, found([[False, False], [False, False], [False, True]]))
    better = row("pairs", SECOND, 512, found([[True, True], [True, True], [True, True]]))
    pairs = compared(worse, better), compared(better, worse)
    assert [pair and pair["verdict"] for pair in pairs] == ["worse", "better"]
    single = row("pairs", FIRST, 512, found([[True, True]]))
    assert compared(single, single) is None


def test_the_table_has_the_first_setting_without_a_difference():
    rows = [
        row("pairs", SECOND, 512, found([[True, False], [True, False]])),
        row("pairs", FIRST, 512, found([[True, True], [True, True]])),
        row("pairs", SECOND, 512, found([[True, True], [True, False]])),
    ]
    rows = in_order(rows)
    assert [one["exact_match"] for one in rows] == [1.0, 0.75]
    lines = table(rows).splitlines()
    assert lines[2] == "| pairs | none | 256 x 4 | 100.0% | 100.0% |  |  |  |"
    assert lines[3].startswith("| pairs | chunks | 64 x 16 | 75.0% | 100.0% | -25.00 | -342.66 to +292.66 |")
    assert lines[-1].startswith("Contexts of 512 tokens, 4 questions of each task about 2 texts.")
    assert "Comparisons: 1;" in lines[-1]
    record: dict[str, Any] = {"command": "c", "device": "d", "date": "", "versions": {}, "rows": rows}
    assert list(record_parts("prefilling_quality", record))[-1] == table(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--instances", "0"], "error: instances is 0, expected a positive integer"),
        (["--append", "no.json"], "error: no.json is no file: --append takes what another run wrote"),
        (["--length", "20"], "error: a text of 20 characters has no whole fact"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.slow
def test_the_bundled_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["--tasks", "pairs", "--instances", "2", "--length", "700", "--out", str(tmp_path)]
    assert main([*asked, "--parts", "first token"]) == 0
    record = tmp_path / "prefilling_quality.json"
    rows = json.loads(record.read_text())["rows"]
    assert [(one["part"], one["questions"], one["recall"]) for one in rows] == [
        ("none", 20, 1.0),
        ("first token", 20, 1.0),
    ]
    assert min(one["exact_match"] for one in rows) > 0.8
    assert "| pairs | first token | chunk_bos=False |" in capsys.readouterr().out
    assert main([*asked, "--length", "800", "--append", str(record)]) == 2
    assert "has the settings" in capsys.readouterr().err
