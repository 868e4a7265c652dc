"""What a plan says, for people: the tensors at the peak, and a picture of live bytes over time."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int64

from jdllm.byte_sizes import format_bytes
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


class Frame(NamedTuple):
    """What a picture shows beside the activations.

    - `title`: of the whole picture.
    - `budget`, `budget_label`: bytes of the device, drawn as a line, and how it is written.
    - `resident`: bytes by name of what stays on the device during the step, drawn below the activations.
    """

    title: str
    budget: int
    budget_label: str
    resident: Mapping[str, int]


def timeline(plan_before: ActivationPlan, plan_after: ActivationPlan, out_path: Path, frame: Frame) -> None:
    """Draw live bytes over the operators of two plans of one template, one above the other on one scale.

    Arguments:
    - `plan_before`: the plan with every count at 1.
    - `plan_after`: the plan that was found.
    - `out_path`: the picture; its suffix names the format, such as `.png`, `.svg` or `.pdf`. An existing
      file is replaced.
    - `frame`: as `Frame` says.

    Raises `JdllmError` where matplotlib is missing, or the format or directory is unknown.
    """
    figure = figure_of(plan_before, plan_after, frame)
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


def figure_of(plan_before: ActivationPlan, plan_after: ActivationPlan, frame: Frame) -> "Figure":
    """The picture of `timeline`, which takes the same arguments."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise JdllmError("the memory timeline needs matplotlib: pip install 'jdllm[plot]'") from None
    figure = Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, sharex=True, sharey=True)
    groups = dict.fromkeys(itertools.chain(live_by_count(plan_before), live_by_count(plan_after)))
    greys = np.linspace(0.6, 0.85, len(frame.resident)).tolist()
    colors = {name: str(grey) for name, grey in zip(frame.resident, greys, strict=True)}
    colors |= {group: f"C{i}" for i, group in enumerate(groups)}
    for axes, plan, name in ((above, plan_before, "nothing cut"), (below, plan_after, "as planned")):
        _draw_plan(axes, plan, name, frame, colors)
    figure.suptitle(frame.title)
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=len(groups) + 1)
    below.set_xticks(np.arange(len(plan_after.ops)) + 0.5, plan_after.ops, rotation=90, fontsize=6)
    return figure


def _draw_plan(
    axes: "Axes", plan: ActivationPlan, name: str, frame: Frame, colors: Mapping[str, str]
) -> None:
    resident = {name: np.full(len(plan.ops), size) for name, size in frame.resident.items()}
    live = resident | live_by_count(plan)
    gib = np.array([np.append(row, row[-1]) for row in live.values()]) / 2**30
    edges = np.arange(len(plan.ops) + 1)
    axes.stackplot(edges, gib, labels=list(live), colors=[colors[group] for group in live], step="post")
    axes.axhline(frame.budget / 2**30, color="black", linestyle="--", label=f"budget {frame.budget_label}")
    peak, staying = plan.ops.index(plan.peak_op), sum(frame.resident.values())
    axes.annotate(
        f"{plan.peak_op}: {format_bytes(plan.lower_bound)} of activations",
        (peak + 0.5, (staying + plan.lower_bound) / 2**30),
        xytext=(0, 6),
        textcoords="offset points",
        ha="right" if 2 * peak > len(plan.ops) else "left",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes.margins(x=0, y=0.15)
    axes.set_ylabel("GiB on the device")
    counts = ", ".join(f"{component} {count}" for component, count in plan.counts.items())
    whole = format_bytes(staying + plan.peak_bytes)
    axes.set_title(
        f"{name} ({counts}): {whole} in all, activations {plan.peak_to_average:.2f} times their average",
        loc="left",
        fontsize="medium",
    )
