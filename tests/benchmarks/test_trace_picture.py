"""What a picture of a trace shows."""

from typing import Any

from benchmarks.trace_picture import Bar, bars_of


def span(name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {"name": name, "ts": 1e6 * begin, "dur": 1e6 * (end - begin), "args": args}


def test_bars_are_cut_at_the_ends_of_the_picture_and_count_from_the_first_arrival():
    spans = {
        "device": [span("refresh", 11, 12), span("reuse", 12, 13), span("reuse", 20, 21)],
        "requests": [
            span("reuse", 11.5, 14, id=9),
            span("waits for refresh", 10, 11.5, id=7),
            span("refresh", 11.5, 12, id=7),
        ],
        "host": [span("reuse", 11, 12)],
    }
    assert bars_of(spans, at=1.25, seconds=1.0) == [
        Bar("device", "refresh", 1.25, 0.75),
        Bar("device", "reuse", 2.0, 0.25),
        Bar("request 7", "waits for refresh", 1.25, 0.25),
        Bar("request 7", "refresh", 1.5, 0.5),
        Bar("request 9", "reuse", 1.5, 0.75),
    ]
