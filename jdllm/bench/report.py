"""A run, and two of them side by side, in words and as JSON."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdllm.bench.records import Record
from jdllm.bench.summary import Spread, Summary, summarize

if TYPE_CHECKING:
    from jdllm.bench.run import Options, Run

_SPREADS = {
    "latency": "latency",
    "time_to_first_text": "time to first text",
    "time_to_first_block": "time to first block",
}
_COUNTS = {
    "completed": "completed",
    "failed": "failed",
    "duration": "duration (s)",
    "request_throughput": "requests/s",
    "generated_tokens_per_second": "generated tokens/s",
    "generated_tokens": "generated tokens",
    "prompt_tokens": "prompt tokens",
    "max_concurrency": "most at once",
    "nfe": "forward evaluations",
}
_MESSAGES = 5
"""Kinds of failures that are told of in words."""


def as_json(options: "Options", run: "Run") -> dict[str, Any]:
    """All of a run but its records. The API key is not told."""
    asked = {k: v for k, v in options._asdict().items() if k not in ("api_key", "lengths", "model", "trace")}
    summary = _plain(summarize(run.records)) if run.records else None
    return {
        "model": run.model,
        "mode": "closed" if options.rate is options.trace is None else "open",
        **asked,
        "trace": None if options.trace is None else str(options.trace.path),
        "interrupted": run.interrupted,
        "summary": summary,
        "server": run.server,
    }


def describe(options: "Options", run: "Run") -> str:
    """A run as a short table."""
    lines = [_title(options, run.model)]
    if run.interrupted:
        lines.append("interrupted: this is what there is")
    if not run.records:
        return "\n".join([*lines, "no request was sent"])
    summary = summarize(run.records)
    parts = [lines, _counts(summary, run), _spreads(summary), _remarks(summary)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def compare(first: Sequence[Record], second: Sequence[Record]) -> dict[str, Any]:
    """Two runs as JSON: the summary of each, and the second's numbers over the first's."""
    a, b = summarize(first), summarize(second)
    figures = _figures(a), _figures(b)
    ratios = {
        name: figures[1][name] / value for name, value in figures[0].items() if value and name in figures[1]
    }
    return {"a": _plain(a), "b": _plain(b), "ratios": ratios, "same_requests": _same_requests(first, second)}


def describe_comparison(first: Sequence[Record], second: Sequence[Record], names: tuple[str, str]) -> str:
    """Two runs as a table, with what changed from the first to the second.

    Arguments:
    - `names`: of the runs.
    """
    a, b = _figures(summarize(first)), _figures(summarize(second))
    rows = [("", "A", "B", "change")]
    for name in [*a, *(name for name in b if name not in a)]:
        rows.append((name, _number(a.get(name)), _number(b.get(name)), _change(a.get(name), b.get(name))))
    lines = [f"A: {names[0]}", f"B: {names[1]}", "", *_table(rows)]
    if not _same_requests(first, second):
        lines += ["", "the two runs did not ask for the same numbers of tokens"]
    return "\n".join(lines)


def _title(options: "Options", model: str) -> str:
    if options.trace is not None:
        load = (
            f"{options.requests} requests, arrivals and lengths of {options.trace.path}, seed {options.seed}"
        )
    elif options.rate is not None:
        load = (
            f"{options.requests} requests, Poisson arrivals, {options.rate:g} a second, seed {options.seed}"
        )
    elif options.concurrency is None or options.concurrency >= options.requests:
        load = f"{options.requests} requests at once"
    else:
        load = f"{options.requests} requests, {options.concurrency} at a time"
    lengths = options.gen_lengths(options.requests)
    least, most = min(lengths), max(lengths)
    asked = str(least) if least == most else f"{least} to {most}"
    streamed = {None: "not streamed", "text": "streamed", "denoise": "streamed step by step"}[options.stream]
    return (
        f"{model}, {options.endpoint}, {streamed}: {load}\n"
        f"each generates {asked} tokens, whatever ends the text (ignore_eos)"
    )


def _counts(summary: Summary, run: "Run") -> list[str]:
    parts = (f"{summary.failed} failed", f"{summary.cancelled} cancelled")
    ended = [part for part in parts if not part.startswith("0 ")]
    rows = [
        ("completed", ", ".join([f"{summary.completed} of {summary.requests}", *ended])),
        ("duration", f"{summary.duration:.2f} s from the first arrival to the last end"),
        ("requests/s", f"{summary.request_throughput:.3f}"),
        ("generated tokens/s", f"{summary.generated_tokens_per_second:.1f} (prompt tokens are not counted)"),
        ("most at once", str(summary.max_concurrency)),
        ("forward evaluations", f"{summary.nfe} (each request's own)"),
    ]
    if run.server and "evaluated" in run.server:
        rows.append(("iterations of the server", str(run.server["evaluated"])))
    if run.server and "compiled" in run.server:
        rows.append(("compiled meanwhile", str(run.server["compiled"])))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _spreads(summary: Summary) -> list[str]:
    rows = [("seconds", *Spread._fields)]
    for field, name in _SPREADS.items():
        spread = getattr(summary, field)
        if spread is not None:
            rows.append((name, str(spread.requests), *(f"{value:.3f}" for value in spread[1:])))
    lines = _table(rows) if len(rows) > 1 else []
    first, second = summary.halves
    if first is not None and second is not None:
        change = f" ({second / first:.2f} times)" if first else ""
        lines.append(f"mean latency of the first half {first:.3f}, of the second half {second:.3f}{change}")
    return lines


def _remarks(summary: Summary) -> list[str]:
    lines = []
    if summary.other_length:
        lines.append(f"{summary.other_length} generated another number of tokens than was asked for")
    if summary.other_nfe:
        lines.append(f"{summary.other_nfe} took another number of forward evaluations than their steps")
    if summary.send_delay > 0.1:
        lines.append(f"requests went out up to {summary.send_delay:.2f} s late: this client was too slow")
    messages = list(summary.errors.items())
    lines += [f"{count} failed: {message}" for message, count in messages[:_MESSAGES]]
    if len(messages) > _MESSAGES:
        lines.append(f"and {len(messages) - _MESSAGES} other messages")
    return lines


def _figures(summary: Summary) -> dict[str, float]:
    """Every number of a summary that two runs can be compared by, by its name in words."""
    figures = {name: getattr(summary, field) for field, name in _COUNTS.items()}
    for field, name in _SPREADS.items():
        spread = getattr(summary, field)
        if spread is not None:
            figures |= {f"{name}, {part} (s)": getattr(spread, part) for part in Spread._fields[1:]}
    halves = zip(("first", "second"), summary.halves, strict=True)
    return figures | {f"latency, mean of the {half} half (s)": v for half, v in halves if v is not None}


def _same_requests(first: Sequence[Record], second: Sequence[Record]) -> bool:
    """Whether two runs asked for the same tokens, as far as records tell."""
    one, other = ({r.index: r for r in records} for records in (first, second))
    both = [(one[i], other[i]) for i in one.keys() & other.keys()]
    return one.keys() == other.keys() and all(
        a.asked_tokens == b.asked_tokens
        and (a.prompt_tokens == b.prompt_tokens or (a.status, b.status) != ("completed", "completed"))
        for a, b in both
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _change(first: float | None, second: float | None) -> str:
    return f"{second / first - 1:+.1%}" if first and second is not None else "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _plain(summary: Summary) -> Mapping[str, Any]:
    """A summary with its spreads as objects."""
    return {
        name: value._asdict() if isinstance(value, Spread) else value
        for name, value in summary._asdict().items()
    }
