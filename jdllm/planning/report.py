"""What a plan says, for people: the tensors at the peak, and a picture of live bytes over time."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int64

from jdllm.errors import JdllmError
from jdllm.planning.planner import ActivationPlan, PlannedTensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class PeakRow(NamedTuple):
    """One tensor that is alive at the peak, its bytes, and their share of the live bytes there."""

    tensor: str
    bytes: int
    share: float


def peak_table(plan: ActivationPlan) -> list[PeakRow]:
    """The tensors that are alive during the operator with the most live bytes, the largest first."""
    peak = plan.ops.index(plan.peak_op)
    alive = [tensor for tensor in plan.tensors if tensor.first <= peak <= tensor.last and tensor.bytes]
    total = sum(tensor.bytes for tensor in alive)
    rows = [PeakRow(tensor.name, tensor.bytes, tensor.bytes / total) for tensor in alive]
    return sorted(rows, key=lambda row: -row.bytes)


def format_peak_table(plan: ActivationPlan) -> str:
    """`peak_table` as text, one line for each tensor, under a line that names the operator."""
    rows = peak_table(plan)
    width = max((len(row.tensor) for row in rows), default=0)
    lines = [f"{row.tensor:<{width}}  {format_bytes(row.bytes):>10}  {row.share:6.1%}" for row in rows]
    return "\n".join([f"{plan.peak_op}: {format_bytes(plan.lower_bound)} alive", *lines])


def format_bytes(count: int) -> str:
    """A number of bytes in the largest binary unit that it reaches, such as "3.08 GiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count} B"


def live_by_count(plan: ActivationPlan) -> dict[str, Int64[np.ndarray, " ops"]]:
    """Live bytes per operator, apart for each set of chunk counts that cuts a tensor.

    Returns int64 `[ops]` by the names of the counts, such as "ffn" or "query, heads"; those of tensors that
    no count cuts come first, as "not chunked".
    """
    live: dict[str, Int64[np.ndarray, " ops"]] = {"not chunked": np.zeros(len(plan.ops), np.int64)}
    for tensor in plan.tensors:
        group = live.setdefault(_group(tensor), np.zeros(len(plan.ops), np.int64))
        group[tensor.first : tensor.last + 1] += tensor.bytes
    return live


def _group(tensor: PlannedTensor) -> str:
    return ", ".join(tensor.cut_by) or "not chunked"


def timeline(plan_before: ActivationPlan, plan_after: ActivationPlan, out_path: Path, budget: int) -> None:
    """Draw live bytes over the operators of two plans of one template, one above the other.

    Arguments:
    - `plan_before`: the plan with every count at 1.
    - `plan_after`: the plan that was found.
    - `out_path`: the picture; its suffix names the format, such as `.png`, `.svg` or `.pdf`. An existing
      file is replaced.
    - `budget`: bytes, drawn as a line.

    Raises `JdllmError` where matplotlib is missing, or the format or directory is unknown.
    """
    figure = _draw(plan_before, plan_after, budget)
    suffix, formats = out_path.suffix.removeprefix("."), figure.canvas.get_supported_filetypes()
    if suffix not in formats:
        raise JdllmError(
            f"cannot draw {out_path}: expected a name that ends in one of {', '.join(sorted(formats))}"
        )
    if not out_path.parent.is_dir():
        raise JdllmError(f"cannot draw {out_path}: {out_path.parent} is not a directory")
    partial = out_path.with_name(f"{out_path.name}.partial")
    figure.savefig(partial, format=suffix, dpi=150)
    partial.replace(out_path)


def _draw(plan_before: ActivationPlan, plan_after: ActivationPlan, budget: int) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise JdllmError("the memory timeline needs matplotlib: pip install 'jdllm[plot]'") from None
    figure = Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    groups = dict.fromkeys(itertools.chain(live_by_count(plan_before), live_by_count(plan_after)))
    colors = {group: f"C{i}" for i, group in enumerate(groups)}
    for axes, plan in ((above, plan_before), (below, plan_after)):
        _draw_plan(axes, plan, budget, colors)
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=len(groups) + 1)
    below.set_xticks(np.arange(len(plan_after.ops)) + 0.5, plan_after.ops, rotation=90, fontsize=6)
    return figure


def _draw_plan(axes: "Axes", plan: ActivationPlan, budget: int, colors: dict[str, str]) -> None:
    live = live_by_count(plan)
    gib = np.array([np.append(row, row[-1]) for row in live.values()]) / 2**30
    edges = np.arange(len(plan.ops) + 1)
    axes.stackplot(edges, gib, labels=list(live), colors=[colors[group] for group in live], step="post")
    axes.axhline(budget / 2**30, color="black", linestyle="--", label=f"budget {format_bytes(budget)}")
    peak = plan.ops.index(plan.peak_op)
    axes.annotate(
        f"{plan.peak_op}: {format_bytes(plan.lower_bound)}",
        (peak + 0.5, plan.lower_bound / 2**30),
        xytext=(0, 6),
        textcoords="offset points",
        ha="right" if 2 * peak > len(plan.ops) else "left",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes.margins(x=0, y=0.15)
    axes.set_ylabel("live GiB")
    counts = ", ".join(f"{component} {count}" for component, count in plan.counts.items())
    axes.set_title(
        f"{counts}: planned {format_bytes(plan.peak_bytes)}, peak to average {plan.peak_to_average:.2f}",
        loc="left",
        fontsize="medium",
    )
