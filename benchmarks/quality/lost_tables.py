"""The table and the picture of the benchmark of facts in long contexts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.quality.tables import markdown
from jdllm.errors import JdllmError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[dict[str, Any]]
"""As `benchmarks.quality.lost_in_the_middle.row` makes them."""


def table(rows: Rows) -> str:
    """A Markdown table: exact match, and recall behind a stroke, by method and length."""
    lengths = sorted({row["length"] for row in rows})
    body = []
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in rows):
        cells = {
            row["length"]: f"{row['exact_match']:.1%} / {row['recall']:.1%}"
            for row in rows
            if (row["task"], row["method"]) == (task, method)
        }
        body.append((task, method, *(cells.get(length, "") for length in lengths)))
    return markdown(("task", "method", *(named(length) for length in lengths)), body, 2)


def named(length: int) -> str:
    """A number of tokens, in k where it is a whole number of these."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def require_matplotlib() -> None:
    """Raise `JdllmError` where it is missing, before anything runs."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise JdllmError("the picture needs matplotlib: pip install 'jdllm[plot]'") from None


def draw(rows: Rows, path: Path) -> None:
    """Draw exact match by position and length, a field for each task and method; replaces what is there."""
    from matplotlib.figure import Figure

    tasks, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("task", "method"))
    size = (3.2 * len(methods) + 1, 2.8 * len(tasks) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(tasks), len(methods), squeeze=False)
    for (i, j), axes in np.ndenumerate(grid):
        chosen = [row for row in rows if (row["task"], row["method"]) == (tasks[i], methods[j])]
        if not chosen:
            axes.set_axis_off()
            continue
        image = _draw_field(axes, chosen, f"{tasks[i]}, {methods[j]}")
        if j == 0:
            axes.set_ylabel("position of the fact")
    figure.colorbar(image, ax=grid.ravel().tolist(), label="exact match")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    figure.savefig(partial, format="png", dpi=110)
    partial.replace(path)


def _draw_field(axes: "Axes", rows: Rows, title: str) -> Any:
    """One task and method; returns the image."""
    values = np.array([row["exact_by_position"] for row in rows]).T
    positions, lengths = values.shape
    image = axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=6)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(lengths), [named(row["length"]) for row in rows], fontsize=7)
    shares = np.linspace(0, 100, positions)
    axes.set_yticks(range(positions), [f"{share:.0f} %" for share in shares], fontsize=7)
    return image
