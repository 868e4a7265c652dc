"""The tables of the quality benchmark of block models."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.quality.tables import INTERVAL, interval, markdown, with_note

Row = dict[str, Any]
"""As `benchmarks.quality.block_cells.row` and `comparisons` make them."""

_SETTING = {"rule": "rule", "block_length": "block", "threshold": "threshold", "editing": "editing"}
"""The fields of a cell, and what tables call them."""


def tables(rows: Sequence[Row], compared: Sequence[Row]) -> str:
    """Markdown tables: all cells, exact match by task, and the `compared` cells."""
    names = list(rows[0]["tasks"])
    cells = ([f"{one['exact_match']:.1%}", f"{one['tokens_per_forward']:.2f}"] for one in rows)
    tasks = ([f"{one['tasks'][name]:.1%}" for name in names] for one in rows)
    pairs = (
        [one["against"], str(one["own_only"]), str(one["other_only"]), *interval(one)] for one in compared
    )
    header = ("against", "only this right", "only the other right", *INTERVAL, "this is")
    parts = [
        _by_setting(rows, ("exact match", "tokens/forward"), cells, 1),
        _by_setting(rows, names, tasks, 1),
        with_note(_by_setting(compared, header, pairs, len(_SETTING) + 1), compared),
    ]
    return "\n\n".join(parts)


def _by_setting(rows: Sequence[Row], header: Sequence[str], body: Iterator[list[str]], left: int) -> str:
    """A table with the columns of `body` behind those of the setting."""
    settings = (["" if one[name] is None else str(one[name]) for name in _SETTING] for one in rows)
    lines = ([*setting, *line] for setting, line in zip(settings, body, strict=True))
    return markdown([*_SETTING.values(), *header], lines, left)
