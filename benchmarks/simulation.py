"""The scheduler under load without a card: parts take as long as a recorded trace says.

`python3 -m benchmarks simulate TRACE` reads what `jdllm serve --trace TRACE` wrote of requests with a cache:
how long parts of each size took, how long the host took, when requests came and how long they were. Then the
same requests arrive at the scheduler of this tree, in a time of its own. So a policy is compared with another
before it is measured. `--rate` asks for Poisson arrivals instead of the recorded ones.
"""

import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import case_parser
from benchmarks.record import print_row
from jdllm.bench.workload import poisson_arrivals
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.ladder import DEFAULT_ROWS, MAX_SEGMENTS, TILE_ROWS, make_ladder
from jdllm.serving.demands import Demand, Kind, Life, Limits, Part
from jdllm.serving.scheduler import Scheduler

CACHED = (Kind.REFRESH, Kind.REUSE)
_NAMES = {kind.name.lower(): kind for kind in CACHED}
Times = Mapping[Kind, Mapping[int, float]]
"""Seconds of a step by kind and packed rows, padding included."""


class Asked(NamedTuple):
    """A request with a cache that commits a token in each step, and refreshes in the first step of a block.

    - `arrival`: in seconds.
    - `prompt`, `length`: tokens of its prompt, and of its whole sequence.
    - `blocks`: how many it denoises.
    - `ahead`: whether its steps may be submitted before the tokens of the steps before have been seen.
    """

    arrival: float
    prompt: int
    length: int
    blocks: int = 8
    ahead: bool = True

    @property
    def block(self) -> int:
        """Steps of a block."""
        return (self.length - self.prompt) // self.blocks

    def demand(self, done: int) -> Demand:
        """What the step behind `done` ones takes."""
        left = self.block - done % self.block
        if left == self.block:
            return Demand(Kind.REFRESH, self.length, left, 0)
        tiles = -(-self.block // TILE_ROWS)
        entries = tiles * -(-self.length // PAGE_ROWS)
        return Demand(Kind.REUSE, tiles * TILE_ROWS, left, entries, left, self.ahead)


class Host(NamedTuple):
    """Seconds of the host.

    - `packing`, `packing_each`: of a part, and of each of its requests.
    - `launch`: from there until the device begins.
    - `taking`, `taking_each`: from the end of a part until the next one is packed, and of this for each step
      of each request.
    - `waking`: by how much a single step that reuses takes longer where the device was idle: it waits for the
      launch of one kernel after the other.
    """

    packing: float = 0.0
    packing_each: float = 0.0
    launch: float = 0.0
    taking: float = 0.0
    taking_each: float = 0.0
    waking: float = 0.0


class Outcome(NamedTuple):
    """What came of a load.

    - `latency`, `first_block`: seconds of each request until its end, and until its first block was there.
    - `evaluated`: forward evaluations; `served`: requests in all of these together.
    - `busy`: share of the time in which the device ran parts.
    - `padding`: share of the rows that belong to nobody.
    """

    latency: np.ndarray
    first_block: np.ndarray
    evaluated: int
    served: int
    busy: float
    padding: float

    def row(self) -> dict[str, Any]:
        """For a table."""
        half = len(self.latency) // 2
        return {
            "latency_mean_s": float(self.latency.mean()),
            "latency_p50_s": float(np.median(self.latency)),
            "latency_p99_s": float(np.percentile(self.latency, 99)),
            "first_half_s": float(self.latency[:half].mean()) if half else None,
            "second_half_s": float(self.latency[half:].mean()),
            "first_block_p50_s": float(np.median(self.first_block)),
            "first_block_p99_s": float(np.percentile(self.first_block, 99)),
            "evaluated": self.evaluated,
            "requests_an_evaluation": self.served / self.evaluated,
            "busy": self.busy,
            "padding": self.padding,
        }


def limits_of(most: int = DEFAULT_ROWS[-1], sizes: Sequence[int] | None = None) -> Limits:
    """Room for parts of so many rows, and for any number of pages, on a server.

    Arguments:
    - `sizes`: rows of refreshes, by default those of the ladder.
    """
    ladder, pages = make_ladder(most), 1 << 20
    return Limits(
        max_num_batched_tokens=most,
        max_num_seqs=MAX_SEGMENTS,
        max_num_logits=ladder.head_rows,
        entries=2 * pages,
        reuse_rows=TILE_ROWS * ladder.tiles,
        pages=pages,
        longest=most,
        longest_refresh=most,
        beside_pool=most,
        whole_rows=most,
        sizes={Kind.REFRESH: sizes or [entry.rows for entry in ladder.refresh]},
        shared=True,
    )


class _Ran(NamedTuple):
    """When a part ended, how long it took, and whether the device was idle before."""

    ended: float
    took: float
    woke: bool


class _Device:
    """Runs parts one after another, each as long as its size takes."""

    def __init__(
        self, times: Times, sizes: Mapping[Kind, Sequence[int]], single: Sequence[int], waking: float
    ):
        self._times = {kind: sorted(of_size.items()) for kind, of_size in times.items()}
        self._sizes, self._single, self._waking = sizes, single, waking
        self.free = self.busy = 0.0
        self.rows = self.padding = 0

    def run(self, kind: Kind, rows: int, steps: int, earliest: float) -> "_Ran":
        """Run a part that could begin at `earliest`."""
        alone = kind is Kind.REUSE and steps == 1
        sizes = self._single if alone else self._sizes[kind]
        size = next((size for size in sizes if size >= rows), rows)
        known, seconds = zip(*self._times[kind], strict=True)
        took = steps * float(np.interp(size, known, seconds))
        woke = earliest > self.free
        took += self._waking if alone and woke else 0.0
        self.rows, self.padding = self.rows + steps * rows, self.padding + steps * (size - rows)
        self.busy += took
        self.free = max(self.free, earliest) + took
        return _Ran(self.free, took, woke)


class _Flight:
    """Parts that are submitted, and the steps of each request that are `done`, or submitted too."""

    def __init__(self, asked: Sequence[Asked]):
        self._asked = asked
        self._parts = deque[tuple[Part, _Ran, int]]()
        self.done, self._sent = [0] * len(asked), [0] * len(asked)

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, part: Part, ran: _Ran) -> None:
        self._parts.append((part, ran, self.rows_of(part)))
        for request in part.ids:
            self._sent[request] += part.steps

    def remove_first(self) -> tuple[Part, _Ran]:
        part, ran, _ = self._parts.popleft()
        for request in part.ids:
            self.done[request] += part.steps
        return part, ran

    def rows_of(self, part: Part) -> int:
        """Packed rows of a part that is not submitted yet."""
        return sum(self._demand(request).rows for request in part.ids)

    def ahead(self, plans: Scheduler) -> dict[int, Demand]:
        """Requests in flight that may reuse in a further part, as the engine has it."""
        parts = [part for part, *_ in self._parts]
        kinds = [part.kind for part in parts]
        late = any(p.steps > 1 or not all(self._asked[i].ahead for i in p.ids) for p in parts)
        if late or len(set(kinds)) < len(kinds):
            return {}
        parts_of = Counter(request for part in parts for request in part.ids)
        alone = (request for request, count in parts_of.items() if count == 1)
        demands = {i: self._demand(i) for i in alone if self._asked[i].ahead and self._in_block(i)}
        return demands if plans.pays_ahead(demands.values()) else {}

    def plan(self, plans: Scheduler, ahead: Mapping[int, Demand]) -> list[Part]:
        """What is submitted next."""
        flying = {request for part, *_ in self._parts for request in part.ids}
        ready = {**{i: self._demand(i) for i in plans.running if i not in flying}, **ahead}
        busy = [part.kind for part, *_ in self._parts if not (ahead and part.kind is Kind.REUSE)]
        rows = 0 if ahead else sum(rows for *_, rows in self._parts)
        parts = plans.plan(ready, busy, rows)
        return [part._replace(steps=1) if ahead.keys() & part.ids else part for part in parts]

    def _demand(self, request: int) -> Demand:
        return self._asked[request].demand(self._sent[request])

    def _in_block(self, request: int) -> bool:
        return self._sent[request] % self._asked[request].block > 0


def simulate(
    asked: Sequence[Asked],
    times: Times,
    host: Host,
    limits: Limits | None = None,
    reuse_sizes: Sequence[int] | None = None,
    scheduler: Callable[[Limits], Scheduler] = Scheduler,
) -> Outcome:
    """Let requests arrive at a scheduler.

    Arguments:
    - `asked`: in the order of their arrival.
    - `times`: of parts; sizes in between are interpolated.
    - `limits`: of the scheduler; the sizes of refreshes among them.
    - `reuse_sizes`: rows of reuses, by default those of the ladder, which has others for single steps.
    """
    limits = limits or limits_of()
    ladder = make_ladder(limits.max_num_batched_tokens)
    loops, single = (reuse_sizes or [entry.rows for entry in part] for part in (ladder.reuse, ladder.single))
    sizes = {Kind.REFRESH: limits.sizes[Kind.REFRESH], Kind.REUSE: loops}
    device = _Device(times, sizes, single, host.waking)
    plans, flight = scheduler(limits), _Flight(asked)
    first, end = [0.0] * len(asked), [0.0] * len(asked)
    now, arrived, evaluated, served = 0.0, 0, 0, 0
    while not all(end):
        while arrived < len(asked) and asked[arrived].arrival <= now:
            length = asked[arrived].length
            plans.add(arrived, Life(length, -(-length // PAGE_ROWS)))
            arrived += 1
        plans.admit()
        for more in (False, True):
            ahead = flight.ahead(plans)
            for part in flight.plan(plans, ahead) if ahead or not more else ():
                rows, count = flight.rows_of(part), len(part.ids)
                now += host.packing + count * host.packing_each
                flight.add(part, device.run(part.kind, rows, part.steps, now + host.launch))
                evaluated, served = evaluated + part.steps, served + part.steps * count
        if not flight:
            now = max(now, asked[arrived].arrival)
            continue
        part, ran = flight.remove_first()
        plans.charge(part, ran.took, woke=ran.woke)
        now = max(now, ran.ended) + host.taking + part.steps * len(part.ids) * host.taking_each
        for i in part.ids:
            if not first[i] and flight.done[i] >= asked[i].block:
                first[i] = now
            if flight.done[i] == asked[i].blocks * asked[i].block:
                end[i] = now
                plans.remove(i)
    arrivals = np.array([one.arrival for one in asked])
    padding = device.padding / (device.rows + device.padding)
    share = device.busy / (now - asked[0].arrival)
    return Outcome(np.array(end) - arrivals, np.array(first) - arrivals, evaluated, served, share, padding)


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


def read_trace(path: Path) -> Recorded:
    """Read what `jdllm.serving.trace.Trace` wrote of requests with a cache that finished."""
    text = path.read_text()
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[names[event["pid"]]].append(event)
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
