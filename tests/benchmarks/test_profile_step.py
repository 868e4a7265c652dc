"""Reading device time from traces."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.steps.profile import KernelEvent, advances, busy_us, by_kernel, device_events, read_events


def named(kind: str, pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    thread = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": kind, "pid": pid, **thread, "args": {"name": name}}


def ran(pid: int, tid: int, name: str, start: float, duration: float, **args: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": duration, "args": args}


def test_only_the_streams_of_an_accelerator_count():
    trace = [
        named("process_name", 1, "/device:GPU:0"),
        named("thread_name", 1, "Stream #13(Compute)", 13),
        named("thread_name", 1, "XLA Ops", 2),
        named("process_name", 7, "/host:CPU"),
        named("thread_name", 7, "python", 5),
        ran(1, 13, "nvjet", 10, 4, hlo_op="gemm.3"),
        ran(1, 2, "gemm.3", 10, 4, hlo_op="gemm.3"),
        ran(7, 5, "Execute", 0, 50, hlo_op="while"),
    ]
    assert list(device_events(trace)) == [KernelEvent("nvjet", "gemm.3", 10, 4)]


def test_overlapping_events_are_busy_once():
    events = [KernelEvent("a", "", 10, 5), KernelEvent("b", "", 0, 4), KernelEvent("c", "", 12, 2)]
    assert busy_us([*events, KernelEvent("d", "", 14, 3)]) == 4 + 7


def test_a_kernel_that_begins_early_moves_the_end_by_what_is_left_of_it():
    a, b, c, d = (
        KernelEvent(*x) for x in (("a", "", 10, 5), ("b", "", 12, 6), ("c", "", 13, 2), ("d", "", 20, 3))
    )
    assert advances([d, b, a, c]) == [(a, 0, 5), (b, 0, 3), (c, 0, 0), (d, 2, 3)]


def test_kernels_are_summed_by_name_per_step_and_ranked():
    events = [KernelEvent("copy", "copy.1", 0, 100.0)]
    events += [KernelEvent("gemm", f"dot.{i}", 200.0 * i, 150.0) for i in (1, 2)]
    assert by_kernel(events, steps=2) == [
        {
            "kernel": "gemm",
            "count": 1.0,
            "ms": 0.15,
            "share": 0.75,
            "idle_us": 75,
            "moves_us": 150,
            "operations": "dot.1 dot.2",
        },
        {
            "kernel": "copy",
            "count": 0.5,
            "ms": 0.05,
            "share": 0.25,
            "idle_us": 0,
            "moves_us": 100,
            "operations": "copy.1",
        },
    ]


def test_without_a_trace_there_is_nothing_to_read(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="trace"):
        read_events(tmp_path)


def test_a_trace_of_a_known_function(tmp_path: Path):
    x = jnp.ones((64, 64))
    executable = jax.jit(lambda x: jnp.sort(x @ x)).lower(x).compile()
    with jax.profiler.trace(tmp_path):
        executable(x).block_until_ready()
    operations, compiled = {event.operation for event in read_events(tmp_path)}, executable.as_text()
    assert operations
    assert compiled is not None
    assert all(operation in compiled for operation in operations)
