"""The quality benchmark's Markdown tables, and head_sparse beside sparse."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.quality.paired import discordance

LEVEL = 0.95


def comparisons(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """head_sparse against sparse, wherever both were evaluated with one rule, retention and delay.

    Arguments:
    - `rows`: cells as `benchmarks.quality.cells.row` gives them, all over the same instances.

    Returns for each: the setting; `head_sparse_only` and `sparse_only`, the instances that only one of the
    two got right; `difference` of the shares of right answers, positive where head_sparse has more; `low` and
    `high`, its Tango interval; and the `verdict` on head_sparse.
    """

    def outcomes(policy: str) -> dict[tuple[Any, ...], list[bool]]:
        return {
            (row["rule"], row["retention"], row["delay"]): [digit == "1" for digit in row["right"]]
            for row in rows
            if row["policy"] == policy
        }

    by_head, by_layer = outcomes("head_sparse"), outcomes("sparse")
    result = []
    for setting in by_head.keys() & by_layer.keys():
        counts = discordance(by_head[setting], by_layer[setting])
        low, high = counts.interval(LEVEL)
        result.append(
            {
                **dict(zip(("rule", "retention", "delay"), setting, strict=True)),
                "head_sparse_only": counts.first,
                "sparse_only": counts.second,
                "difference": counts.difference,
                "low": low,
                "high": high,
                "verdict": counts.verdict(LEVEL),
            }
        )
    order = {setting: place for place, setting in enumerate(by_head)}
    return sorted(result, key=lambda row: order[row["rule"], row["retention"], row["delay"]])


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown tables: all cells, exact match by task, and head_sparse against sparse where both are."""
    parts = [_cells(rows), _tasks(rows)]
    compared = comparisons(rows)
    if compared:
        parts.append(_compared(compared))
    return "\n\n".join(parts)


def _cells(rows: Sequence[dict[str, Any]]) -> str:
    header = (
        *("rule", "cache", "retention", "delay", "exact match"),
        *("tokens/forward", "tokens/1000 rows", "answers as exact", "tokens as exact"),
    )
    body = (
        (
            *_setting(row),
            f"{row['exact_match']:.1%}",
            f"{row['tokens_per_forward']:.2f}",
            f"{1000 * row['tokens_per_row']:.1f}",
            f"{row['same_answers']:.1%}",
            f"{row['same_tokens']:.1%}",
        )
        for row in rows
    )
    return markdown(header, body, 2)


def _tasks(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0]["tasks"])
    body = ((*_setting(row), *(f"{row['tasks'][name]:.1%}" for name in names)) for row in rows)
    return markdown(("rule", "cache", "retention", "delay", *names), body, 2)


def _setting(row: dict[str, Any]) -> tuple[str, ...]:
    retention, delay = ("" if row[name] is None else str(row[name]) for name in ("retention", "delay"))
    return row["rule"], row["policy"], retention, delay


def _compared(rows: Sequence[dict[str, Any]]) -> str:
    header = (
        *("rule", "retention", "delay", "only head_sparse right", "only sparse right"),
        *("difference (points)", f"{LEVEL:.0%} interval", "head_sparse is"),
    )
    body = (
        (
            *(row["rule"], str(row["retention"]), str(row["delay"])),
            *(str(row["head_sparse_only"]), str(row["sparse_only"])),
            f"{100 * row['difference']:+.2f}",
            f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f}",
            row["verdict"],
        )
        for row in rows
    )
    note = (
        f"Intervals are Tango's for paired proportions. Comparisons: {len(rows)}; where nothing differs"
        f" {(1 - LEVEL) * len(rows):.1f} of them exclude 0 by chance."
    )
    return f"{markdown(header, body, 1)}\n\n{note}"


def markdown(header: Sequence[str], body: Iterable[Sequence[str]], left: int) -> str:
    """A table whose first `left` columns are flush left, the others flush right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *body))
