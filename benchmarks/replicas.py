"""Many replicas behind one router, without a card: requests of a trace arrive at several schedulers."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import case_parser
from benchmarks.record import print_row, record
from benchmarks.recorded_trace import Recorded, read_trace
from benchmarks.simulation import Asked, Outcome, simulate
from jdllm.bench.workload import poisson_arrivals

ROUTINGS = ("random", "in turn")


def shares(replicas: int, rate: float, requests: int, routing: str) -> list[list[float]]:
    """When requests arrive at each replica.

    Arguments:
    - `rate`: of arrivals at a replica, a second; `replicas` times as many arrive at the router.
    - `requests`: of a replica, on average.
    - `routing`: "random", where the router draws a replica for each request, or "in turn".
    """
    arrivals = poisson_arrivals(replicas * rate, replicas * requests, seed=0)
    owner = np.arange(len(arrivals)) % replicas
    if routing == "random":
        owner = np.random.default_rng(1).integers(replicas, size=len(arrivals))
    return [np.asarray(arrivals)[owner == replica].tolist() for replica in range(replicas)]


def row_of(
    found: Recorded, replicas: int, rate: float, requests: int, routing: str, simulated: int
) -> dict[str, Any]:
    """A row of the table.

    Arguments:
    - `simulated`: how many replicas are simulated at most; all are alike.
    """
    latency: list[np.ndarray] = []
    for arrivals in shares(replicas, rate, requests, routing)[:simulated]:
        lengths = itertools.cycle(found.asked)
        asked: list[Asked] = [one._replace(arrival=at) for at, one in zip(arrivals, lengths, strict=False)]
        outcome: Outcome = simulate(asked, found.times, found.host)
        latency.append(outcome.latency)
    together = np.concatenate(latency)
    return {
        "replicas": replicas,
        "a_second_each": rate,
        "routing": routing,
        "requests": len(together),
        "latency_mean_s": float(together.mean()),
        "latency_p50_s": float(np.quantile(together, 0.5)),
        "latency_p99_s": float(np.quantile(together, 0.99)),
        "worst_replica_s": float(max(each.mean() for each in latency)),
    }


def main(arguments: Sequence[str]) -> None:
    """Latency of many replicas behind a router, from the times of one.

    `python3 -m benchmarks replicas TRACE [--replicas 1 10 100] [--rate 1.0 1.5 1.8]`, with what `jdllm serve
    --trace TRACE` wrote on a card. Arrivals at the router are Poisson; rates are those of a replica. Times
    are simulated, as in `simulate`, for up to `--simulated` replicas of each row.
    """
    parser = case_parser("replicas", main.__doc__)
    parser.add_argument("trace", type=Path, help="what jdllm serve --trace FILE wrote")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0, 1.5, 1.8], help="requests a second")
    parser.add_argument("--requests", type=int, default=200, help="of a replica")
    parser.add_argument("--simulated", type=int, default=8)
    args = parser.parse_args(arguments)
    found, table = read_trace(args.trace), []
    for rate, replicas, routing in itertools.product(args.rate, args.replicas, ROUTINGS):
        if replicas == 1 and routing != ROUTINGS[0]:
            continue  # the same requests
        table.append(row_of(found, replicas, rate, args.requests, routing, args.simulated))
        print_row(table[-1])
    record("replicas", table, args.out)
