"""What phase multiplexing is worth, without a card: requests of a trace under two schedulers.

Ours serves refreshes and reuses side by side, whoever is due. The other one serves one phase at a time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import case_parser
from benchmarks.record import print_row, record
from benchmarks.recorded_trace import Recorded, read_trace
from benchmarks.simulation import Asked, simulate
from jdllm.bench.workload import poisson_arrivals
from jdllm.serving.demands import Demand, Held, Kind, Limits, Part
from jdllm.serving.scheduler import Scheduler


class InPhase(Scheduler):
    """Serves requests with a cache in step: all refreshes that are due, then reuses until every block is
    done, and so on. Nobody starts while others reuse, and each plan waits for the part before it."""

    def __init__(self, limits: Limits):
        super().__init__(limits)
        self._phase = Kind.REFRESH

    def admit(self) -> list[int]:
        """Start requests while others refresh, or nobody runs, as far as there is room."""
        return super().admit() if self._phase is Kind.REFRESH or not self.running else []

    def plan(
        self,
        ready: Mapping[int, Demand],
        busy: Collection[Kind] = (),
        in_flight_rows: int = 0,
        held: Held | None = None,
    ) -> list[Part]:
        """The part of the present phase; the next phase begins where nobody is left in this one."""
        if busy or not ready:
            return []
        kinds = {demand.kind for demand in ready.values()}
        if self._phase not in kinds:
            (self._phase,) = kinds
        return super().plan({one: demand for one, demand in ready.items() if demand.kind is self._phase})


SCHEDULERS: dict[str, Callable[[Limits], Scheduler]] = {
    "phases side by side": Scheduler,
    "one phase at a time": InPhase,
}


def compare(found: Recorded, asked: Sequence[Asked], arrivals: str) -> list[dict[str, Any]]:
    """A row for each scheduler.

    Arguments:
    - `found`: the trace, which says how long parts and the host take.
    - `asked`: the requests, in the order of their arrival.
    - `arrivals`: how they arrive, for the table.
    """
    rows = []
    for name, scheduler in SCHEDULERS.items():
        outcome = simulate(asked, found.times, found.host, scheduler=scheduler)
        rows.append({"scheduler": name, "arrivals": arrivals, "requests": len(asked), **outcome.row()})
        print_row(rows[-1])
    return rows


def main(arguments: Sequence[str]) -> None:
    """Compare the scheduler with one that serves one phase at a time, under a recorded load.

    `python3 -m benchmarks phases TRACE [--rate 0.5 1.5 ...]`, with what `jdllm serve --trace TRACE` wrote on
    a card: two rows for the arrivals of the trace, and two for Poisson arrivals at each rate. Times are
    simulated, as in `simulate`.
    """
    parser = case_parser("phases", main.__doc__)
    parser.add_argument("trace", type=Path, help="what jdllm serve --trace FILE wrote")
    parser.add_argument("--rate", type=float, nargs="+", default=[], help="requests a second")
    args = parser.parse_args(arguments)
    found = read_trace(args.trace)
    table = compare(found, found.asked, "as recorded")
    for rate in args.rate:
        arrivals = poisson_arrivals(rate, len(found.asked), seed=0)
        asked = [one._replace(arrival=at) for one, at in zip(found.asked, arrivals, strict=True)]
        table += compare(found, asked, f"{rate:g} a second")
    record("serving_phases", table, args.out, recorded_latency_mean_s=float(found.latency.mean()))
