"""The table of the benchmark of settings for long contexts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.quality.paired import mean_interval
from benchmarks.quality.tables import INTERVAL, LEVEL, interval, markdown

Row = dict[str, Any]
"""As `benchmarks.quality.prefilling_cells.row` makes them."""


def compared(row: Row, base: Row) -> Row | None:
    """A setting against the first one, by texts: the mean difference, its interval and what this says.

    Returns `difference` of the shares of right answers, positive where this setting has more, `low`, `high`
    and `verdict`; `None` for a single text, over which there is no interval.
    """
    own, other = (np.array([text.count("1") / len(text) for text in one["right"]]) for one in (row, base))
    differences = own - other
    found = mean_interval(differences, LEVEL)
    if found is None:
        return None
    verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "no difference shown"
    return {"difference": float(differences.mean()), **found._asdict(), "verdict": verdict}


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: exact match and recall of every setting, and the difference to the first one."""
    bases = {row["task"]: row for row in reversed(rows)}
    body, pairs = [], 0
    for row in rows:
        pair = None if row is bases[row["task"]] else compared(row, bases[row["task"]])
        pairs += pair is not None
        cells = f"{row['exact_match']:.1%}", f"{row['recall']:.1%}", *(interval(pair) if pair else [""] * 3)
        body.append((row["task"], row["part"], row["value"], *cells))
    header = ("task", "changed", "to", "exact match", "recall", *INTERVAL, "this is")
    first = rows[0]
    note = (
        f"Contexts of {first['length']} tokens, {first['questions']} questions of each task about"
        f" {first['instances']} texts. Intervals are Student's, of the mean difference of a text; one without"
        " a width means that all texts differ by the same."
        f" Comparisons: {pairs}; where nothing differs {(1 - LEVEL) * pairs:.1f} of them exclude 0 by chance."
    )
    return f"{markdown(header, body, 3)}\n\n{note}"
