"""What a run comes to: throughput, latencies and failures, out of its records alone."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jdllm.bench.records import Record


class Spread(NamedTuple):
    """A distribution of seconds over the requests that have one; `std` is the deviation of a sample,
    percentiles are interpolated."""

    requests: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float


class Summary(NamedTuple):
    """A run. Only completed requests count, but for `requests` to `errors`, `duration` and `max_concurrency`.

    - `errors`: how often each message was seen.
    - `other_length`: requests that did not generate exactly the tokens that were asked for.
    - `other_nfe`: requests whose forward evaluations differ from the requested steps.
    - `duration`: from the first arrival to the last end.
    - `generated_tokens`: without tokens of the prompts, as in every rate.
    - `latency` and the times to the first text and block: from when a request was due, not from when it was
      sent.
    - `halves`: mean latency of the requests that arrived first, and of the others: one that grows tells of
      more load than the server takes.
    - `send_delay`: the longest time from when a request was due until it went out. What is not small is a
      client that was too slow.
    - `nfe`: forward evaluations of all requests, each counted for itself.
    """

    requests: int
    completed: int
    failed: int
    cancelled: int
    errors: dict[str, int]
    other_length: int
    other_nfe: int
    duration: float
    request_throughput: float
    prompt_tokens: int
    generated_tokens: int
    generated_tokens_per_second: float
    latency: Spread | None
    time_to_first_text: Spread | None
    time_to_first_block: Spread | None
    halves: tuple[float | None, float | None]
    max_concurrency: int
    send_delay: float
    nfe: int


def summarize(records: Sequence[Record]) -> Summary:
    """The summary of a run.

    Arguments:
    - `records`: at least one, in any order.
    """
    records = sorted(records, key=lambda r: r.index)
    statuses = Counter(r.status for r in records)
    done = [r for r in records if r.status == "completed"]
    duration = max(r.ended for r in records) - min(r.scheduled for r in records)
    generated = sum(r.completion_tokens for r in done)
    half = records[len(records) // 2].index
    return Summary(
        requests=len(records),
        completed=len(done),
        failed=statuses["failed"],
        cancelled=statuses["cancelled"],
        errors=dict(Counter(r.error for r in records if r.status == "failed" and r.error).most_common()),
        other_length=sum(r.completion_tokens != r.asked_tokens for r in done),
        other_nfe=sum(None not in (r.nfe, r.steps) and r.nfe != r.steps for r in done),
        duration=duration,
        request_throughput=_rate(len(done), duration),
        prompt_tokens=sum(r.prompt_tokens for r in done),
        generated_tokens=generated,
        generated_tokens_per_second=_rate(generated, duration),
        latency=_spread(done, lambda r: r.latency),
        time_to_first_text=_spread(done, lambda r: r.time_to_first_text),
        time_to_first_block=_spread(done, lambda r: r.time_to_first_block),
        halves=(
            _mean([r.latency for r in done if r.index < half]),
            _mean([r.latency for r in done if r.index >= half]),
        ),
        max_concurrency=_most_at_once(records),
        send_delay=max(r.sent - r.scheduled for r in records),
        nfe=sum(r.nfe or 0 for r in done),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of `values` do not exceed, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _spread(records: Sequence[Record], of: Callable[[Record], float | None]) -> Spread | None:
    values = [value for value in map(of, records) if value is not None]
    if not values:
        return None
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    percentiles = (percentile(values, percent) for percent in (50, 90, 99))
    return Spread(len(values), statistics.fmean(values), std, *percentiles)


def _most_at_once(records: Sequence[Record]) -> int:
    """The most requests that were under way at a time; one that ends as another is sent is not beside it."""
    changes = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
