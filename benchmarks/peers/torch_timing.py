"""Timing on the device, for the benchmarks of torch."""

# pyright: reportMissingImports=false

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def event_seconds(run: Callable[[], Any], inner: int = 4, repeats: int = 5, warm_up: int = 2) -> float:
    """Median time of `run`, by events around `inner` calls of it; nothing else may use the device."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / inner)
    return statistics.median(times)


def graph_seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Mean time of one of `calls`, all of them replayed from one CUDA graph: without the host's share."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return event_seconds(graph.replay) / len(calls)


def reason(error: RuntimeError) -> str:
    """The first line of an error of torch, whose messages are long."""
    return next(iter(str(error).splitlines()), type(error).__name__)
