"""Facts in long contexts: what is asked, what is counted, and a run of the whole benchmark."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality.lost_in_the_middle import (
    PLAIN,
    SETTINGS,
    TRUNCATED,
    Found,
    draw_questions,
    in_order,
    long_prompts,
    main,
    methods_at,
    row,
)
from benchmarks.quality.lost_tables import draw, table
from benchmarks.tables import record_parts
from jdllm.demo.long_tasks import LONG_TASKS, is_whole
from jdllm.demo.tasks import Instance, split_of
from jdllm.errors import RequestError

BUNDLED = ["--tasks", "pairs", "--key-letters", "2", "--instruction", ""]
TINY = [*BUNDLED, "--settings", "64x2", "--instances", "2", "--positions", "3"]


def found(right: list[list[bool]]) -> Found:
    return Found(np.array(right), np.ones_like(right, bool), 1.5)


@pytest.mark.parametrize("task", LONG_TASKS)
@pytest.mark.parametrize("length", [2048, 16384])
def test_a_fact_is_asked_at_every_position_of_every_text(task: str, length: int):
    questions = draw_questions(task, length, 3, 10, (256, 128), 4)
    assert len(questions) == 30
    assert len({question.haystack.text for question in questions}) == 3
    for i, (haystack, fact) in enumerate(questions):
        assert split_of(Instance("long", haystack.text, "")) == "test"
        assert len(haystack.text) == length
        assert fact in haystack.facts
        assert is_whole(fact, 128)
        assert is_whole(fact, 256)
        middle = (fact.start + fact.stop) / 2
        # Of sentences, one in four to six is a fact here, and borders of chunks cut some.
        assert abs(middle - length * (i % 10) / 9) < (25 if task == "pairs" else 600)


def test_questions_about_a_text_share_its_ids():
    first, second, third = long_prompts(draw_questions("pairs", 300, 2, 2, (64,), 4), "")[:3]
    assert first.context is second.context
    assert first.context is not third.context
    assert bytes(np.asarray(first.query).tolist()).startswith(b"get ")


def test_a_text_without_a_whole_fact_is_refused():
    with pytest.raises(RequestError, match="a text of 20 characters has no whole fact"):
        draw_questions("pairs", 20, 1, 1, (4,), 4)


def test_the_plain_run_is_for_short_contexts():
    assert list(methods_at(4096, SETTINGS, 4096)) == [*SETTINGS, PLAIN, TRUNCATED]
    assert list(methods_at(8192, SETTINGS, 4096)) == [*SETTINGS, TRUNCATED]
    assert list(methods_at(512, SETTINGS, 4096)) == [*SETTINGS, PLAIN]


def test_rows_count_by_position():
    counted = row("pairs", "256x16", 2048, found([[True, False], [True, True]]))
    assert counted["exact_match"] == 0.75
    assert counted["exact_by_position"] == [1.0, 0.5]
    assert counted["recall"] == 1
    assert counted["instances"] == 2


def test_a_later_row_replaces_an_earlier_one_and_the_table_has_a_column_for_each_length(tmp_path: Path):
    rows = [row("pairs", method, length, found([[True]])) for length in (4096, 1000) for method in ("a", "b")]
    rows = in_order([*rows, row("pairs", "a", 1000, found([[False]]))])
    lines = [
        "| task | method | 1000 | 4k |",
        "| --- | --- | ---: | ---: |",
        "| pairs | b | 100.0% / 100.0% | 100.0% / 100.0% |",
        "| pairs | a | 0.0% / 100.0% | 100.0% / 100.0% |",
    ]
    assert sorted(table(rows).splitlines()) == sorted(lines)
    record: dict[str, Any] = {"command": "c", "device": "d", "date": "", "versions": {}, "rows": rows}
    assert list(record_parts("lost_in_the_middle", record))[-1] == table(rows)
    pytest.importorskip("matplotlib")
    draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--settings", "256"], "error: setting '256': expected tokens of a chunk x chunks kept, as 256x16"),
        (["--settings", "1x4"], "error: prefilling: chunk_length"),
        (["--instances", "0"], "error: instances is 0, expected a positive integer"),
        (["--lengths", "0"], "error: a length is 0, expected positive integers"),
        (["--append", "no.json"], "error: no.json is no file: --append takes what another run wrote"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    assert main(options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.slow
def test_the_bundled_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    assert main([*TINY, "--lengths", "252", "--out", str(tmp_path)]) == 0
    record = tmp_path / "lost_in_the_middle.json"
    rows = json.loads(record.read_text())["rows"]
    assert [(r["method"], r["length"], r["instances"]) for r in rows] == [("64x2", 252, 2), (PLAIN, 252, 2)]
    # It was trained on such contexts as a whole, and not on chunks.
    assert rows[1]["exact_match"] > 0.5
    assert all(len(r["exact_by_position"]) == 3 for r in rows)
    assert "| pairs | 64x2 |" in capsys.readouterr().out
    assert (tmp_path / "lost_in_the_middle.png").exists()
    assert main([*TINY, "--lengths", "189", "--append", str(record), "--out", str(tmp_path)]) == 0
    assert [r["length"] for r in json.loads(record.read_text())["rows"]] == [189, 189, 252, 252]
