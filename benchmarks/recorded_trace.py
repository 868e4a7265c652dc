"""What a trace of an engine tells a simulation: requests, and how long parts and the host took.

`python3 -m benchmarks simulate TRACE` reads what `jdllm serve --trace TRACE` wrote of requests with a cache.
`--rate` asks for Poisson arrivals instead of the recorded ones.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import case_parser
from benchmarks.record import print_row
from benchmarks.simulation import CACHED, Asked, Host, Times, simulate
from jdllm.bench.workload import poisson_arrivals
from jdllm.serving.demands import Kind

_NAMES = {kind.name.lower(): kind for kind in CACHED}


class Recorded(NamedTuple):
    """What a trace tells.

    - `asked`: its requests; `latency`: seconds of each.
    - `times`, `host`: of its parts.
    - `evaluated`: forward evaluations.
    """

    asked: list[Asked]
    latency: np.ndarray
    times: Times
    host: Host
    evaluated: int


def read_spans(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of what `jdllm.serving.trace.Trace` wrote, by process: "device", "host" and "requests"."""
    text = path.read_text()
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[names[event["pid"]]].append(event)
    return spans


def read_trace(path: Path) -> Recorded:
    """Read a trace of requests with a cache that finished."""
    spans = read_spans(path)
    asked, latency = _asked(spans["requests"])
    times, waking = _times(spans["host"], spans["device"])
    host = _host(spans["host"], spans["device"])._replace(waking=waking)
    evaluated = sum(part["args"]["steps"] for part in spans["device"] if part["name"] in _NAMES)
    return Recorded(asked, latency, times, host, evaluated)


def _times(host: Sequence[dict[str, Any]], device: Sequence[dict[str, Any]]) -> tuple[Times, float]:
    """How long a step takes by kind and size, and by how much a single step that reuses takes longer on an
    idle device. The spans of both are in the same order."""
    packed = [span for span in host if span["tid"] == 0]
    took: dict[Kind, dict[int, list[float]]] = {kind: defaultdict(list) for kind in CACHED}
    woken: list[tuple[int, float]] = []
    for before, part in zip(packed, device, strict=True):
        if part["name"] not in _NAMES:
            continue
        said, kind = part["args"], _NAMES[part["name"]]
        rows, seconds = said["rows"] + said["padding"], part["dur"] / said["steps"] / 1e6
        if kind is Kind.REUSE and said["steps"] == 1 and before["args"]["idle_before"]:
            woken.append((rows, seconds))
        else:
            took[kind][rows].append(seconds)
    for rows, seconds in woken:
        if rows not in took[Kind.REUSE]:  # there is no other
            took[Kind.REUSE][rows].append(seconds)
    times = {kind: {rows: median(found) for rows, found in sizes.items()} for kind, sizes in took.items()}
    longer = [seconds - times[Kind.REUSE][rows] for rows, seconds in woken]
    return times, max(0.0, median(longer)) if longer else 0.0


def _asked(spans: Sequence[dict[str, Any]]) -> tuple[list[Asked], np.ndarray]:
    """The requests of spans, in the order of their arrival, and the latency of each."""
    own: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        own[span["args"]["id"]].append(span)
    begun = sorted(own.values(), key=lambda found: found[0]["ts"])
    zero = begun[0][0]["ts"]
    asked = [
        Asked(
            (found[0]["ts"] - zero) / 1e6,
            *(found[0]["args"][n] for n in ("prompt_tokens", "tokens", "blocks")),
        )
        for found in begun
    ]
    ends = [max(span["ts"] + span["dur"] for span in found) for found in begun]
    return asked, np.array([(end - found[0]["ts"]) / 1e6 for end, found in zip(ends, begun, strict=True)])


def _host(host: Sequence[dict[str, Any]], device: Sequence[dict[str, Any]]) -> Host:
    """What the host takes, from its spans and the device's, which are in the same order."""
    packed, taken = ([span for span in host if span["tid"] == line] for line in (0, 1))
    count = np.array([span["args"]["requests"] for span in device])
    packing, packing_each = _line(count, np.array([span["dur"] for span in packed]))
    steps = np.array([span["args"]["steps"] for span in device])
    collected = sorted((span["ts"] + span["dur"], n) for span, n in zip(taken, count * steps, strict=True))
    starts = sorted(span["ts"] for span in packed)
    following = np.searchsorted(starts, [at for at, _ in collected])
    gaps = [(n, starts[i] - at) for (at, n), i in zip(collected, following, strict=True) if i < len(starts)]
    found = np.array([gap for gap in gaps if gap[1] < 50_000]).reshape(-1, 2)
    taking, taking_each = _line(found[:, 0], found[:, 1])
    idle = [
        part["ts"] - span["ts"] - span["dur"]
        for part, span in zip(device, packed, strict=True)
        if span["args"]["idle_before"]
    ]
    launch = median(idle) if idle else 0.0
    return Host(*(seconds / 1e6 for seconds in (packing, packing_each, launch, taking, taking_each)))


def _line(count: np.ndarray, took: np.ndarray) -> tuple[float, float]:
    """What a part takes, and each of its requests; by least squares, and nothing below zero."""
    if len(set(count.tolist())) < 2:
        return float(np.median(took)) if len(took) else 0.0, 0.0
    slope, at_zero = np.polyfit(count, took, 1)
    return max(0.0, float(at_zero)), max(0.0, float(slope))


def main(arguments: Sequence[str]) -> None:
    """Compare a recorded load with the same load on the scheduler of this tree.

    `python3 -m benchmarks simulate TRACE [--rate 2.0 ...]`: a line for the recorded requests, and one for
    Poisson arrivals at each rate, with the lengths of the recorded ones in turn.
    """
    parser = case_parser("simulate", main.__doc__)
    parser.add_argument("trace", type=Path, help="what jdllm serve --trace FILE wrote")
    parser.add_argument("--rate", type=float, nargs="+", default=[], help="requests a second")
    args = parser.parse_args(arguments)
    found = read_trace(args.trace)
    print_row(
        {"requests": len(found.asked), "latency_mean_s": found.latency.mean(), "evaluated": found.evaluated}
    )
    print_row({"simulated": "the same", **simulate(found.asked, found.times, found.host).row()})
    for rate in args.rate:
        arrivals = poisson_arrivals(rate, len(found.asked), seed=0)
        asked = [one._replace(arrival=at) for one, at in zip(found.asked, arrivals, strict=True)]
        print_row({"simulated": f"{rate:g} a second", **simulate(asked, found.times, found.host).row()})
