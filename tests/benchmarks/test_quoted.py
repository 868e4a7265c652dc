"""The README quotes its records, to the digits that it gives."""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.record import RESULTS

README = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
SPEED = README[README.index("## Speed") : README.index("## Supported checkpoints")]
NUMBER = r"(\d+(?:\.\d+)?)"


class Quote(NamedTuple):
    """A figure of a record and where it is quoted: `{}` stands for the number in `text`."""

    record: str
    row: dict[str, Any]
    key: str
    text: str
    unit: float = 1.0


def cell(label: str, column: int) -> str:
    """The pattern of a table's cell, as far as its number."""
    return rf"\| {re.escape(label)} \|" + r"[^|]*\|" * column + " {}"


def steps() -> Iterator[Quote]:
    for shape, label in {
        "llada-8b": "LLaDA-8B",
        "dream-7b": "Dream-7B",
        "llada-moe-7b": "LLaDA-MoE-7B-A1B",
    }.items():
        for column, rows in enumerate((1024, 4096, 16384, 32768)):
            if (shape, rows) == ("llada-moe-7b", 32768):
                continue
            text = cell(label, column)
            yield Quote(f"step_{shape}", {"system": "jdllm", "rows": rows}, "step_ms", text)
            ratio = text.replace("{}", r"[\d.]+ \({}x\)")
            yield Quote(f"step_{shape}", {"system": "torch-compiled", "rows": rows}, "ratio", ratio)


def cached_steps() -> Iterator[Quote]:
    llada, dream, moe = (f"cached_step_{shape}" for shape in ("llada-8b", "dream-7b", "llada-moe-7b"))
    yield Quote(llada, {"form": "chain"}, "step_ms", "takes {} ms for LLaDA-8B")
    yield Quote(llada, {"form": "layers"}, "step_ms", "for LLaDA-8B, and {} in the same run")
    yield Quote(llada, {"form": "chain"}, "floor_ms", "its bytes alone take {} at")
    yield Quote(dream, {"form": "chain"}, "step_ms", "For Dream-7B it takes {}, and")
    yield Quote(dream, {"form": "layers"}, "step_ms", "and {} where kernels wait")
    yield Quote(dream, {"form": "chain"}, "floor_ms", r"where kernels wait; its bytes take {}\.")
    yield Quote(moe, {"form": "layers"}, "step_ms", "For LLaDA-MoE it takes {}, its bytes")
    yield Quote(moe, {"form": "layers"}, "floor_ms", rf"LLaDA-MoE it takes {NUMBER[1:-1]}, its bytes {{}}\.")


def generations() -> Iterator[Quote]:
    alone, many, both, delayed = (
        f"generate_llada-8b_{kind}"
        for kind in (
            "dual-none-head_sparse_b1_p512",
            "dual_b16_p512",
            "dual-head_sparse_b8_p2048",
            "head_sparse_b8_p2048",
        )
    )
    none, dual = '`cache="none"` (exact)', '`cache="dual"`'
    first, second = (
        f'`cache="head_sparse"`, retention 0.5, refreshed at the {step} step' for step in ("first", "second")
    )
    yield Quote(alone, {"cache": "none"}, "tokens_s", cell(none, 0))
    yield Quote(alone, {"cache": "dual"}, "tokens_s", cell(dual, 0))
    yield Quote(both, {"cache": "dual"}, "tokens_s", cell(dual, 1))
    yield Quote(many, {"cache": "dual"}, "tokens_s", cell(dual, 2))
    yield Quote(both, {"cache": "head_sparse"}, "tokens_s", cell(first, 1))
    yield Quote(alone, {"cache": "head_sparse"}, "tokens_s", cell(second, 0))
    yield Quote(delayed, {"delay": 1}, "tokens_s", cell(second, 1))


def loads() -> Iterator[Quote]:
    yield Quote("load", {}, "seconds", "from the page cache takes {} s")
    yield Quote("load", {}, "gb_per_s", r"\({} GB/s\)")
    yield Quote("load", {}, "host_peak_above_weights_bytes", "and {} MB of host memory", 1e6)


@pytest.mark.parametrize(
    "quote",
    [*steps(), *cached_steps(), *generations(), *loads()],
    ids=lambda q: "-".join([q.record, *map(str, q.row.values()), q.key]),
)
def test_a_quoted_figure_is_that_of_its_record(quote: Quote):
    found = re.search(quote.text.replace("{}", NUMBER), SPEED)
    assert found, f"the README no longer says {quote.text!r}"
    rows = json.loads((RESULTS / f"{quote.record}.json").read_text())["rows"]
    [row] = [row for row in rows if quote.row.items() <= row.items()]
    quoted = Decimal(found[1])
    places = Decimal(1).scaleb(int(quoted.as_tuple().exponent))
    assert Decimal(row[quote.key] / quote.unit).quantize(places) == quoted
