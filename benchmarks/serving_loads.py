"""Loads that a served model is measured under, and the capacity that a sweep over rates finds."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.generations import WORKLOAD

BURSTS = WORKLOAD.with_name("bursts120.jsonl")
SMALL = "small, 32 clients"

STABLE = 1.3
"""A rate is stable where the second half's mean latency is at most so many times the first half's."""

Lengths = Literal["short", "mixed", "long"]

LENGTHS: Mapping[Lengths, tuple[str, ...]] = {
    "short": ("--prompt-length", "128"),
    "mixed": ("--lengths", str(WORKLOAD)),
    "long": ("--prompt-length", "2048:8192"),
}
"""Lengths of prompts, as options of `jdllm bench serve`."""


class Load(NamedTuple):
    """A load on the server.

    - `name`: in the table.
    - `sampling`: of its requests, beside blocks of 32 and a step for each token.
    - `requests`: how many; `None` for those of a trace.
    - `options`: further options of `jdllm bench serve`.
    - `rate`: requests that arrive in a second, whatever the server does; `None` where no rate says when.
    - `lengths`: of the prompts of a rate.
    - `trace`: a file that says when requests arrive.
    """

    name: str
    sampling: dict[str, Any]
    requests: int | None
    options: tuple[str, ...]
    rate: float | None = None
    lengths: Lengths | None = None
    trace: Path | None = None

    @property
    def open(self) -> bool:
        """Whether its requests arrive when they do, whatever the server does."""
        return self.rate is not None or self.trace is not None

    @property
    def whole(self) -> "Load":
        """The same load, whose answers come whole."""
        return self._replace(options=(*self.options, "--no-stream"))

    @property
    def arguments(self) -> list[str]:
        """Options of `jdllm bench serve` that say how many requests arrive when, and how long they are."""
        count = () if self.requests is None else ("--requests", str(self.requests))
        lengths = () if self.lengths is None else LENGTHS[self.lengths]
        rate = () if self.rate is None else ("--mode", "open", "--rate", str(self.rate))
        trace = () if self.trace is None else ("--trace", str(self.trace))
        return [*count, *lengths, *rate, *trace, *self.options]


def head_sparse(delay: int) -> dict[str, Any]:
    """dLLM-Serve's cache, with half of the keys kept."""
    return {"cache": "head_sparse", "retention": 0.5, "refresh_delay": delay}


def arriving(rate: float, requests: int, lengths: Lengths = "mixed") -> Load:
    """Requests that arrive as a Poisson process."""
    said = "" if lengths == "mixed" else f", {lengths}"
    return Load(f"{rate:g} a second{said}", head_sparse(0), requests, (), rate, lengths)


_MIXED = LENGTHS["mixed"]

OTHER_CACHES: Mapping[str, dict[str, Any]] = {
    "dual": {"cache": "dual", "refresh_delay": 0},
    "sparse": {"cache": "sparse", "retention": 0.5, "refresh_delay": 0},
}
"""Caches that keep every key, and the same half of the keys for all heads: what `head_sparse` is beside."""

LOADS = {
    "delay_1": Load("32 at once", head_sparse(1), 32, (*_MIXED, "--no-stream")),
    "delay_0": Load("32 at once", head_sparse(0), 32, (*_MIXED, "--no-stream")),
    "plain_64": Load("64 at once", head_sparse(0), 64, (*_MIXED, "--no-stream")),
    "denoise_64": Load("64 at once", head_sparse(0), 64, (*_MIXED, "--stream-mode", "denoise")),
    "poisson_0.25": arriving(0.25, 60),
    "poisson_0.5": arriving(0.5, 60),
    "poisson_1.0": arriving(1.0, 120),
    "poisson_1.5": arriving(1.5, 200),
    "poisson_2.0": arriving(2.0, 200),
    "poisson_2.5": arriving(2.5, 200),
    "short_1.0": arriving(1.0, 120, "short"),
    # A long request has 1.2 s of arithmetic at 700 TFLOP/s: one a second is beyond any scheduler.
    "long_0.25": arriving(0.25, 60, "long"),
    "long_0.5": arriving(0.5, 60, "long"),
    # Without lengths of their own they are no part of a sweep over rates.
    **{
        f"{name}_1.5": Load(f"1.5 a second, {name}", sampling, 200, _MIXED, rate=1.5)
        for name, sampling in OTHER_CACHES.items()
    },
    **{
        f"{name}_32": Load(f"32 at once, {name}", sampling, 32, (*_MIXED, "--no-stream"))
        for name, sampling in OTHER_CACHES.items()
    },
    "burst": Load("bursts", head_sparse(0), None, (), trace=BURSTS),
    "threshold_32": Load(
        SMALL,
        {"transfer": "threshold", "threshold": 0.9},
        256,
        ("--prompt-length", "40", "--no-stream", "--concurrency", "32"),
    ),
}
"""What may be measured; the last one is for the bundled model on a CPU."""


def capacities(measured: Iterable[tuple[Load, Mapping[str, Any]]]) -> dict[Lengths, float | None]:
    """The capacity for each kind of lengths of which several rates were measured.

    Arguments:
    - `measured`: loads, each with its row of the table.

    A capacity is the highest stable rate with an answer to every request, `None` where there is none.
    """
    rates: dict[Lengths, dict[float, bool]] = {}
    for load, row in measured:
        if load.rate is not None and load.lengths is not None:
            rates.setdefault(load.lengths, {})[load.rate] = _is_stable(row)
    return {
        lengths: max((rate for rate, stable in found.items() if stable), default=None)
        for lengths, found in rates.items()
        if len(found) > 1
    }


def _is_stable(row: Mapping[str, Any]) -> bool:
    first, second = row["first_half_s"], row["second_half_s"]
    if row["completed"] < row["requests"] or first is None or second is None:
        return False
    return second <= STABLE * first
