"""The scheduler under load without a card: parts take as long as a recorded trace says.

`python3 -m benchmarks simulate TRACE` (`benchmarks.recorded_trace`) takes from a trace of an engine how long
parts of each size took, how long the host took, when requests came and how long they were. Then the same
requests arrive at the scheduler of this tree, in a time of its own. So a policy is compared with another
before it is measured.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.ladder import DEFAULT_ROWS, MAX_SEGMENTS, TILE_ROWS, make_ladder
from jdllm.serving.demands import COMPANY_ROWS, CUT, Demand, Held, Kind, Life, Limits, Part
from jdllm.serving.scheduler import Scheduler

CACHED = (Kind.REFRESH, Kind.REUSE)
Times = Mapping[Kind, Mapping[int, float]]
"""Seconds of a step by kind and packed rows, padding included."""


class Asked(NamedTuple):
    """A request with a cache that commits a token in each step, and refreshes in the first step of a block.

    - `arrival`: in seconds.
    - `prompt`, `length`: tokens of its prompt, and of its whole sequence.
    - `blocks`: how many it denoises.
    - `ahead`: whether its steps may be submitted before the tokens of the steps before have been seen.
    - `refresh_parts`: into how many parts each of its refreshes is cut by layers; 1 for a whole one.
    """

    arrival: float
    prompt: int
    length: int
    blocks: int = 8
    ahead: bool = True
    refresh_parts: int = 1

    @property
    def block(self) -> int:
        """Steps of a block."""
        return (self.length - self.prompt) // self.blocks

    @property
    def turns(self) -> int:
        """Parts that serve a block, one step or some layers each."""
        return self.block + self.refresh_parts - 1

    def place(self, done: int) -> int:
        """The place in its block of the turn behind `done` ones; the refresh comes first."""
        return done % self.turns

    def demand(self, done: int) -> Demand:
        """What the turn behind `done` ones takes."""
        if self.place(done) < self.refresh_parts:
            kind = Kind.REFRESH if self.refresh_parts == 1 else Kind.LAYERS
            return Demand(kind, self.length, self.block, 0)
        left = self.turns - self.place(done)
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
    - `longest_wait`: the longest that each request waited for a step, in seconds.
    - `evaluated`: forward evaluations; `served`: requests in all of these together.
    - `busy`: share of the time in which the device ran parts.
    - `padding`: share of the rows that belong to nobody.
    """

    latency: np.ndarray
    first_block: np.ndarray
    longest_wait: np.ndarray
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
            "longest_wait_s": float(self.longest_wait.max()),
            "evaluated": self.evaluated,
            "requests_an_evaluation": self.served / self.evaluated,
            "busy": self.busy,
            "padding": self.padding,
        }


def cut(asked: Sequence[Asked], layers: int, company_rows: int = COMPANY_ROWS) -> list[Asked]:
    """The same requests, with long refreshes cut by layers.

    Arguments:
    - `layers`: of the model.
    - `company_rows`: of `Limits`.
    """

    def parts(length: int) -> int:
        count = max(1, company_rows * layers // length)
        return -(-layers // count) if length > CUT * company_rows else 1

    return [one._replace(refresh_parts=parts(one.length)) for one in asked]


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
        self.free = self.busy = self.rows = self.padding = 0.0

    def run(self, kind: Kind, rows: int, steps: int, earliest: float, share: float = 1.0) -> _Ran:
        """Run a part that could begin at `earliest`, or a share of a refresh."""
        kind = Kind.REFRESH if kind is Kind.LAYERS else kind
        alone = kind is Kind.REUSE and steps == 1
        sizes = self._single if alone else self._sizes[kind]
        size = next((size for size in sizes if size >= rows), rows)
        took = share * steps * _seconds_of(size, self._times[kind])
        woke = earliest > self.free
        took += self._waking if alone and woke else 0.0
        self.rows, self.padding = (
            self.rows + share * rows * steps,
            self.padding + share * steps * (size - rows),
        )
        self.busy += took
        self.free = max(self.free, earliest) + took
        return _Ran(self.free, took, woke)


def _seconds_of(rows: int, times: Sequence[tuple[int, float]]) -> float:
    """Seconds of a step of so many rows. Rows beyond the largest step that was measured cost the same each.

    Arguments:
    - `times`: rows and seconds of measured steps, by rows.
    """
    known, seconds = zip(*times, strict=True)
    return float(np.interp(rows, known, seconds)) * max(1.0, rows / known[-1])


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

    def share_of(self, part: Part) -> float:
        """The share of a step that a part does."""
        return 1 / self._asked[part.ids[0]].refresh_parts if part.kind is Kind.LAYERS else 1.0

    def ahead(self, plans: Scheduler) -> dict[int, Demand]:
        """Requests in flight that may reuse in a further part, as the engine has it."""
        parts = [part for part, *_ in self._parts if part.kind in CACHED]
        kinds = [part.kind for part in parts]
        reuses = [part for part in parts if part.kind is Kind.REUSE]
        late = any(part.steps > 1 or not all(self._asked[i].ahead for i in part.ids) for part in reuses)
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
        parts = plans.plan(ready, busy, rows, self._held(plans))
        return [part._replace(steps=1) if ahead.keys() & part.ids else part for part in parts]

    def _demand(self, request: int) -> Demand:
        return self._asked[request].demand(self._sent[request])

    def _in_block(self, request: int) -> bool:
        return self._asked[request].place(self._sent[request]) >= self._asked[request].refresh_parts

    def _held(self, plans: Scheduler) -> Held | None:
        """The request whose hidden rows are held: the largest size of others has no room beside them, and the
        next one has, as it is with LLaDA-8B."""
        limits, begun = plans.limits, (i for i in plans.running if self._begun(i))
        rows = limits.max_num_batched_tokens - limits.sizes[Kind.REFRESH][-2]
        return next((Held(request, rows) for request in begun), None)

    def _begun(self, request: int) -> bool:
        return 0 < self._asked[request].place(self._sent[request]) < self._asked[request].refresh_parts


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
    - `times`: of parts. Sizes in between are interpolated. A larger one takes as much longer as it has more
      rows.
    - `limits`: of the scheduler; the sizes of refreshes among them.
    - `reuse_sizes`: rows of reuses, by default those of the ladder, which has others for single steps.
    """
    limits = limits or limits_of()
    ladder = make_ladder(limits.max_num_batched_tokens)
    loops, single = (reuse_sizes or [entry.rows for entry in part] for part in (ladder.reuse, ladder.single))
    sizes = {Kind.REFRESH: limits.sizes[Kind.REFRESH], Kind.REUSE: loops}
    device = _Device(times, sizes, single, host.waking)
    plans, flight = scheduler(limits), _Flight(asked)
    first, end, wait = [0.0] * len(asked), [0.0] * len(asked), [0.0] * len(asked)
    told = [one.arrival for one in asked]
    now, arrived, evaluated, served = 0.0, 0, 0.0, 0.0
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
                share = flight.share_of(part)
                flight.add(part, device.run(part.kind, rows, part.steps, now + host.launch, share))
                evaluated, served = evaluated + part.steps * share, served + part.steps * share * count
        if not flight:
            now = max(now, asked[arrived].arrival)
            continue
        part, ran = flight.remove_first()
        plans.charge(part, ran.took, woke=ran.woke)
        now = max(now, ran.ended) + host.taking + part.steps * len(part.ids) * host.taking_each
        for i in part.ids:
            if asked[i].place(flight.done[i]) in (0, *range(asked[i].refresh_parts, asked[i].turns)):
                wait[i], told[i] = max(wait[i], now - told[i]), now
            if not first[i] and flight.done[i] >= asked[i].turns:
                first[i] = now
            if flight.done[i] == asked[i].blocks * asked[i].turns:
                end[i] = now
                plans.remove(i)
    arrivals = np.array([one.arrival for one in asked])
    padding = device.padding / (device.rows + device.padding)
    share = device.busy / (now - asked[0].arrival)
    return Outcome(
        np.array(end) - arrivals,
        np.array(first) - arrivals,
        np.array(wait),
        round(evaluated),
        round(served),
        share,
        padding,
    )
