"""docs/results.md and the README's figures are those of the records."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import tables
from benchmarks.record import RESULTS

ROOT = Path(__file__).parents[2]


class Quote(NamedTuple):
    """A figure of a record and the line and cell of the README's table that quote it, in some unit."""

    line: str
    cell: int
    record: str
    row: dict[str, Any]
    key: str
    unit: float = 1.0


GENERATION = 'generation, `cache="dual"`, '
ONE, EIGHT, MANY = (
    f"generate_llada-8b_{kind}"
    for kind in ("dual-none-head_sparse_b1_p512", "dual_b8_p2048", "dual_b16_p512")
)
QUOTES = [
    Quote("full step, 4096 rows", 1, "step_llada-8b", {"system": "jdllm", "rows": 4096}, "step_ms"),
    Quote("full step, 4096 rows", 2, "step_llada-8b", {"system": "torch-compiled", "rows": 4096}, "step_ms"),
    Quote("cached step, 32 rows against 4096", 1, "cached_step_llada-8b", {"form": "chain"}, "step_ms"),
    Quote("cached step, 32 rows against 4096", 2, "cached_step_llada-8b", {"form": "chain"}, "floor_ms"),
    Quote(GENERATION + "1 prompt of 512", 1, ONE, {"cache": "dual"}, "tokens_s"),
    Quote(GENERATION + "1 prompt of 512", 2, "fast_dllm_llada-8b", {"batch": 1}, "tokens_s"),
    Quote(GENERATION + "8 prompts of 2048", 1, EIGHT, {"cache": "dual"}, "tokens_s"),
    Quote(GENERATION + "16 prompts of 512", 1, MANY, {}, "tokens_s"),
    Quote(
        "longest context in 24 GiB",
        1,
        "plan_lmax",
        {"shape": "llada-8b", "budget_gib": 24},
        "context",
    ),
    Quote(
        "longest context in 24 GiB",
        2,
        "plan_lmax",
        {"shape": "llada-8b", "budget_gib": 24},
        "tiered_context",
    ),
    Quote("loading from the page cache", 1, "load", {}, "seconds"),
    Quote("loading from the page cache", 2, "load", {}, "host_peak_above_weights_bytes", 1e6),
    Quote(
        "first block of a new process, beyond loading",
        1,
        "first_calls_llada-8b",
        {"code": "this", "process": "second", "call": "dual"},
        "beyond_load_s",
    ),
    Quote(
        'bundled model, `cache="dual"`', 1, "quality_demo_schedule", {"policy": "dual"}, "exact_match", 0.01
    ),
    Quote(
        'bundled model, `cache="dual"`', 2, "quality_demo_schedule", {"policy": "none"}, "exact_match", 0.01
    ),
]


@pytest.mark.parametrize("quote", QUOTES, ids=lambda q: f"{q.line}-{q.cell}")
def test_a_quoted_figure_is_that_of_its_record(quote: Quote):
    [line] = [x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith(f"| {quote.line} |")]
    found = re.search(r"\d[\d,]*(?:\.\d+)?", line.split("|")[1 + quote.cell])
    assert found
    rows = json.loads((RESULTS / f"{quote.record}.json").read_text())["rows"]
    [row] = [row for row in rows if quote.row.items() <= row.items()]
    quoted = Decimal(found[0].replace(",", ""))
    places = Decimal(1).scaleb(int(quoted.as_tuple().exponent))
    assert abs(Decimal(str(row[quote.key])) / Decimal(str(quote.unit)) - quoted) <= places / 2


def test_contexts_that_were_run_stand_beside_those_of_plans():
    [line] = [x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith("| longest context ")]
    [whole], [layers] = (
        json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        for name in ("plan_longest", "tiers_llada-8b_residual_1048576")
    )
    assert re.findall(r"([\d,]+) run", line)[0] == f"{whole['context']:,}"
    assert f"{layers['layers']} layers run at {layers['rows']:,}" in line
    assert len(re.findall(r"planned", line)) == 2


def test_both_documents_are_what_the_script_writes(tmp_path: Path):
    """After `python3 -m benchmarks results` nothing changes."""
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    tables.write(tmp_path / "results.md", readme)
    assert (tmp_path / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()
    assert readme.read_text() == (ROOT / "README.md").read_text()


class TestTables:
    @pytest.fixture
    def results(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(tables, "RESULTS", tmp_path)
        return tmp_path

    @staticmethod
    def put(results: Path, name: str, rows: list[dict[str, Any]], **extra: Any) -> None:
        record = {"command": "python3 -m benchmarks x", "device": "card", "date": "2026-01-02"}
        record |= {"commit": "0123456789abcdef", "versions": {"jax": "1.2"}, "rows": rows, **extra}
        (results / f"{name}.json").write_text(json.dumps(record))

    def test_a_record_of_no_section_is_shown_whole(self, results: Path):
        rows = [
            {"case": "a", "ms": 1.23456, "shape": "s", "tasks": {}},
            {"case": "b", "fits": True, "shape": "s"},
        ]
        self.put(results, "unheard_of", rows, note="By hand.")
        said = tables.document()
        assert "## Others" in said
        assert "## Full steps" not in said
        assert "`python3 -m benchmarks x`, card, 2026-01-02, commit 0123456789, jax 1.2. By hand." in said
        assert "In all rows: shape s." in said
        assert "| case | ms | fits |\n| --- | ---: | ---: |\n| a | 1.235 |  |\n| b |  | yes |" in said

    def test_every_record_stands_in_one_section(self, results: Path):
        names = [path.stem for path in RESULTS.glob("*.json")]
        for name in names:
            (results / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
        assert sorted(re.findall(r"^### (.*)$", tables.document(), re.M)) == sorted(names)

    def test_figures_without_a_record_are_left_out_and_two_rows_are_no_figure(self, results: Path):
        loaded = {"seconds": 4.321, "host_peak_above_weights_bytes": 41_000_000}
        self.put(results, "load", [loaded])
        assert tables.figures().splitlines()[2:] == [
            "| loading from the page cache | 4.32 s | 41 MB of host memory |"
        ]
        self.put(results, "load", [loaded, loaded])
        with pytest.raises(ValueError, match="load has 2 rows"):
            tables.figures()

    def test_a_readme_without_its_marks(self, tmp_path: Path):
        (tmp_path / "README.md").write_text("nothing")
        with pytest.raises(ValueError, match="has no <!-- figures"):
            tables.write(tmp_path / "results.md", tmp_path / "README.md")
