"""How the step's benchmark puts ours and the peers side by side."""

import pytest

from benchmarks.steps.full import parse_rows, with_ratios


def test_rows_of_a_peer_are_the_json_lines_and_all_lines_are_shown(capsys: pytest.CaptureFixture[str]):
    lines = ['{"rows": 8, "step_ms": 2.5}\n', "torch-eager: no row for llada-8b: out of memory\n"]
    assert list(parse_rows(lines)) == [{"rows": 8, "step_ms": 2.5}]
    assert capsys.readouterr().out == "".join(lines)


def test_ratio_is_the_time_of_a_peer_over_ours_at_the_same_rows():
    def row(system: str, rows: int, ms: float) -> dict[str, object]:
        return {"system": system, "rows": rows, "step_ms": ms}

    ours = [row("jdllm", 8, 2.0), row("jdllm", 16, 4.0)]
    table = with_ratios([*ours, row("jax", 8, 3.0), row("jax", 16, 2.0), row("torch-eager", 16, 8.0)])
    assert [(r["system"], r["rows"], r.get("ratio")) for r in table] == [
        ("jdllm", 8, None),
        ("jax", 8, 1.5),
        ("jdllm", 16, None),
        ("jax", 16, 0.5),
        ("torch-eager", 16, 2.0),
    ]
