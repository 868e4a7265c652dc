"""The quality benchmark's Markdown tables, and which of its cells are better."""

from collections.abc import Iterable, Sequence
from typing import Any

from jdllm.demo.paired import discordance

LEVEL = 0.95

Row = dict[str, Any]

_SETTING = {"rule": "rule", "policy": "cache", "retention": "retention", "delay": "delay", "window": "window"}
"""The fields of a setting, and what tables call them."""

INTERVAL = ("difference (points)", f"{LEVEL:.0%} interval")


def comparisons(rows: Sequence[Row]) -> list[Row]:
    """head_sparse against sparse, wherever both were evaluated with one rule, retention, delay and window.

    Arguments:
    - `rows`: cells as `benchmarks.quality.cells.row` gives them, all over the same instances.

    Returns for each: the setting; `head_sparse_only` and `sparse_only`, the instances that only one of the
    two got right; `difference` of the shares of right answers, positive where head_sparse has more; `low` and
    `high`, its Tango interval; and the `verdict` on head_sparse.
    """
    cells = {_cell(row): row for row in rows}
    result = []
    for row in rows:
        other = cells.get(_cell({**row, "policy": "sparse"}))
        if row["policy"] == "head_sparse" and other is not None:
            setting = {name: row.get(name) for name in _SETTING if name != "policy"}
            result.append({**setting, **paired(row, other, "head_sparse_only", "sparse_only")})
    return result


def changes(rows: Sequence[Row]) -> list[Row]:
    """Cells with a suffix window against those without one, and falling thresholds against the fixed one.

    Arguments:
    - `rows`: cells as `benchmarks.quality.cells.row` gives them, all over the same instances.

    Returns for each: the setting; `against`, what the other cell has instead; `own_only` and `other_only`,
    the instances that only one of the two got right; and the rest as `comparisons` does.
    """
    cells = {_cell(row): row for row in rows}
    result = []
    for row in rows:
        others = [("all masks", {"window": None})] if row.get("window") is not None else []
        others += [("threshold", {"rule": "threshold"})] if row["rule"].startswith("falling") else []
        for against, change in others:
            other = cells.get(_cell({**row, **change}))
            if other is not None:
                setting = {name: row.get(name) for name in _SETTING}
                pair = paired(row, other, "own_only", "other_only")
                result.append({**setting, "against": against, **pair})
    return result


def _cell(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _SETTING)


def paired(row: Row, other: Row, own_name: str, other_name: str) -> Row:
    """The paired comparison of two cells that were evaluated on the same instances.

    Arguments:
    - `row`, `other`: with `right`, a digit for each instance.
    - `own_name`, `other_name`: what the counts of instances that only one got right are called.
    """
    own, theirs = ([digit == "1" for digit in one["right"]] for one in (row, other))
    counts = discordance(own, theirs)
    low, high = counts.interval(LEVEL)
    return {
        own_name: counts.first,
        other_name: counts.second,
        "difference": counts.difference,
        "low": low,
        "high": high,
        "verdict": counts.verdict(LEVEL),
    }


def tables(rows: Sequence[Row]) -> str:
    """Markdown tables: all cells, exact match by task, head_sparse against sparse where both are, and what
    windows and thresholds that fall change."""
    parts = [_cells(rows), _tasks(rows)]
    if compared := comparisons(rows):
        parts.append(_compared(compared))
    if changed := changes(rows):
        parts.append(_changed(changed))
    return "\n\n".join(parts)


def _cells(rows: Sequence[Row]) -> str:
    header = ("exact match", "tokens/forward", "tokens/1000 rows", "answers as exact", "tokens as exact")
    body = (
        (
            f"{row['exact_match']:.1%}",
            f"{row['tokens_per_forward']:.2f}",
            f"{1000 * row['tokens_per_row']:.1f}",
            f"{row['same_answers']:.1%}",
            f"{row['same_tokens']:.1%}",
        )
        for row in rows
    )
    return _by_setting(rows, header, body, 2)


def _tasks(rows: Sequence[Row]) -> str:
    names = list(rows[0]["tasks"])
    return _by_setting(rows, names, ([f"{row['tasks'][name]:.1%}" for name in names] for row in rows), 2)


def _compared(rows: Sequence[Row]) -> str:
    header = ("only head_sparse right", "only sparse right", *INTERVAL, "head_sparse is")
    body = ([str(row["head_sparse_only"]), str(row["sparse_only"]), *interval(row)] for row in rows)
    return with_note(_by_setting(rows, header, body, 1), rows)


def _changed(rows: Sequence[Row]) -> str:
    header = ("against", "only this right", "only the other right", *INTERVAL, "this is")
    body = ([row["against"], str(row["own_only"]), str(row["other_only"]), *interval(row)] for row in rows)
    return with_note(_by_setting(rows, header, body, 2), rows)


def interval(row: Row) -> list[str]:
    """The cells of a paired comparison below `INTERVAL`, and the verdict."""
    low, high = 100 * row["low"], 100 * row["high"]
    return [f"{100 * row['difference']:+.2f}", f"{low:+.2f} to {high:+.2f}", row["verdict"]]


def with_note(table: str, rows: Sequence[Row]) -> str:
    """A table of paired comparisons, and how to read its intervals."""
    note = (
        f"Intervals are Tango's for paired proportions. Comparisons: {len(rows)}; where nothing differs"
        f" {(1 - LEVEL) * len(rows):.1f} of them exclude 0 by chance."
    )
    return f"{table}\n\n{note}"


def _by_setting(rows: Sequence[Row], header: Sequence[str], body: Iterable[Sequence[str]], left: int) -> str:
    """A table with the columns of `body` behind those of the setting that the rows have."""
    windows = any(row.get("window") is not None for row in rows)
    names = [name for name in _SETTING if (windows if name == "window" else name in rows[0])]
    settings = (["" if row.get(name) is None else str(row[name]) for name in names] for row in rows)
    lines = ([*setting, *line] for setting, line in zip(settings, body, strict=True))
    return markdown([*(_SETTING[name] for name in names), *header], lines, left)


def markdown(header: Sequence[str], body: Iterable[Sequence[str]], left: int) -> str:
    """A table whose first `left` columns are flush left, the others flush right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *body))
