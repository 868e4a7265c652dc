"""Where the device time of one denoising step goes, by kernel.

Run as `python3 -m benchmarks profile [--shape llada-8b] [--rows 4096 | --cached 4096] [--quantization int4]
[--trace DIR]` on a card. With `--rows` the step is that of `benchmarks.steps.full`: random weights, half of
the rows masked and evaluated. With `--cached` it is that of `benchmarks.steps.cached`: 32 rows against so
many cached ones. Times are those of the device's streams; what the streams wait for is in `wall_ms` only.
"""

import collections
import gzip
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.cases import case_parser
from benchmarks.record import record, waited_seconds
from benchmarks.shapes import SHAPES
from benchmarks.steps import cached, full
from jdllm.engine_options import QUANTIZATIONS
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, init_params

SHOWN = 25


class KernelEvent(NamedTuple):
    """One execution on the device: kernel name, the HLO instruction and module that it belongs to ("" if
    unknown), and times.

    `start` and `duration` are microseconds.
    """

    name: str
    operation: str
    start: float
    duration: float
    module: str = ""


def read_events(directory: Path) -> list[KernelEvent]:
    """The device's events in the trace that `jax.profiler.trace` left below `directory`.

    Without an accelerator these are the operators of the CPU client's threads. Raises `FileNotFoundError`
    where there is no trace, and `ValueError` for one without device events.
    """
    files = sorted(directory.glob("**/*.trace.json.gz"))
    if not files:
        raise FileNotFoundError(f"no *.trace.json.gz below {directory}")
    with gzip.open(files[-1], "rt") as file:
        trace = json.load(file)["traceEvents"]
    events = list(device_events(trace))
    if not events:
        threads = [event["args"]["name"] for event in trace if event.get("name") == "thread_name"]
        raise ValueError(f"no device events in {files[-1]}; its threads are {threads}")
    return events


def device_events(events: Sequence[dict[str, Any]]) -> Iterator[KernelEvent]:
    """Kernels and copies of the accelerators' streams; of a trace without accelerators, the operators.

    Beside its streams an accelerator has threads that repeat their events by operator, module or step.
    """
    names: dict[tuple[int, int | None], str] = {}
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            thread = event.get("tid") if event["name"] == "thread_name" else None
            names[event["pid"], thread] = event["args"]["name"]
    on_device = any("/device:" in name for (_, thread), name in names.items() if thread is None)
    for event in events:
        if event.get("ph") != "X":
            continue
        args = event.get("args") or {}
        operation = str(args.get("hlo_op", ""))
        device = "/device:" in names.get((event["pid"], None), "")
        stream = names.get((event["pid"], event.get("tid")), "").startswith("Stream")
        if (device and stream) if on_device else operation:
            start, duration = float(event["ts"]), float(event.get("dur", 0))
            yield KernelEvent(event["name"], operation, start, duration, str(args.get("hlo_module", "")))


def busy_us(events: Sequence[KernelEvent]) -> float:
    """Microseconds in which at least one event runs."""
    busy, end = 0.0, -math.inf
    for event in sorted(events, key=lambda event: event.start):
        stop = event.start + event.duration
        busy += max(0.0, stop - max(event.start, end))
        end = max(end, stop)
    return busy


def advances(events: Sequence[KernelEvent]) -> list[tuple[KernelEvent, float, float]]:
    """Each event with the microseconds for which nothing ran before it, and those by which it moves the end.

    The end is the moment at which this event and all that began before it are over. A kernel of a chain
    begins while the one before it runs. Its duration has the time for which it waits, and what it moves the
    end has not. The sum of both columns is the time from the first event to the last.
    """
    found, end = [], min((event.start for event in events), default=0.0)
    for event in sorted(events, key=lambda event: event.start):
        idle = max(0.0, event.start - end)
        stop = max(end, event.start + event.duration)
        found.append((event, idle, stop - end - idle))
        end = stop
    return found


def by_kernel(events: Sequence[KernelEvent], steps: int) -> list[dict[str, Any]]:
    """A row for each kernel name, count and time per step, share of the device time.

    The first rows are the kernels that move the end most, idle time before them included. `idle_us` and
    `moves_us` are the means of the columns of `advances` for one execution. `operations` names up to three of
    the HLO instructions that ran it.
    """
    groups: dict[str, list[tuple[KernelEvent, float, float]]] = collections.defaultdict(list)
    for advance in advances(events):
        groups[advance[0].name].append(advance)
    total = sum(event.duration for event in events)
    rows = []
    for name, group in groups.items():
        duration = sum(event.duration for event, _, _ in group)
        operations = dict.fromkeys(
            event.operation for event, _, _ in group if event.operation not in ("", name)
        )
        rows.append(
            {
                "kernel": name,
                "count": len(group) / steps,
                "ms": duration / steps / 1e3,
                "share": duration / total,
                "idle_us": sum(idle for _, idle, _ in group) / len(group),
                "moves_us": sum(moves for _, _, moves in group) / len(group),
                "operations": " ".join(list(operations)[:3]),
            }
        )
    return sorted(rows, key=lambda row: -row["count"] * (row["idle_us"] + row["moves_us"]))


def profile(dispatch: Callable[[], Any], directory: Path) -> tuple[list[KernelEvent], float]:
    """Trace one dispatch; its events, and the seconds of a dispatch that is not traced."""
    seconds = waited_seconds(dispatch)
    with jax.profiler.trace(directory):
        jax.block_until_ready(dispatch())
    return read_events(directory), seconds


def full_step(params: Params, config: ModelConfig, rows: int) -> Callable[[], Any]:
    """A dispatch of `full.STEPS` full steps."""
    executable, batch = full.compile_step(params, config, rows)
    return lambda: executable(params, batch, np.int32(full.STEPS))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("profile", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--rows", type=int, default=4096)
    kind.add_argument("--cached", type=int)
    parser.add_argument("--fresh", type=int, default=32, help="rows of a cached step")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the matrices of layers")
    parser.add_argument("--trace", type=Path, help="where to leave the trace; by default nowhere")
    args = parser.parse_args(arguments)
    config = SHAPES[args.shape].quantised(args.quantization)
    params = init_params(config, jax.random.key(0), "bfloat16")
    if args.cached:
        dispatch = cached.compile_step(params, config, fresh=args.fresh, cached=args.cached)
        name, steps = f"profile_cached_step_{args.shape}_{args.cached}", cached.STEPS
    else:
        dispatch = full_step(params, config, args.rows)
        name, steps = f"profile_step_{args.shape}_{args.rows}", full.STEPS
    name += f"_{args.quantization}" if args.quantization else ""
    with tempfile.TemporaryDirectory() as scratch:
        events, seconds = profile(dispatch, args.trace or Path(scratch))
    busy, wall = busy_us(events) / steps / 1e3, 1e3 * seconds / steps
    table = by_kernel(events, steps)
    record(
        name,
        table[:SHOWN],
        args.out,
        steps=steps,
        busy_ms=busy,
        wall_ms=wall,
        kernels=len(table),
    )
    print(f"device busy {busy:.3f} ms a step, which takes {wall:.3f} ms without the profiler")
