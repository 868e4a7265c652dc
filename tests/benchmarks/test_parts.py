"""Which executable a kernel's time belongs to."""

import jax.numpy as jnp

from benchmarks.steps.parts import by_part
from benchmarks.steps.profile import KernelEvent
from jdllm.compiling.executables import Executables, Program
from jdllm.serving.demands import Kind
from jdllm.serving.updates import PartDone, PartTimes

TIMES = PartTimes((0.0,), 0.0, 0.0, 0.0, 0.0, 0.0)


def part(kind: Kind, rows: int, padding: int, steps: int) -> PartDone:
    return PartDone(kind, (0,), rows, padding, 1, steps, 0.0, TIMES)


def test_kernels_count_for_the_part_that_ran_them():
    module = "jit_reuse_of_96_rows"
    events = [KernelEvent("dot", "dot.1", 10.0 * i, 4.0, module) for i in range(6)]
    events += [KernelEvent("add", "add.1", 10.0 * i + 2, 3.0, module) for i in range(3)]
    events += [KernelEvent("dot", "dot.9", 100.0, 50.0, "jit_refresh_of_768_rows")]
    events += [KernelEvent("copy", "", 200.0, 1.0)]
    done = [part(Kind.REFRESH, 700, 68, 1), part(Kind.REUSE, 64, 32, 1), part(Kind.REUSE, 96, 0, 2)]
    told = [
        (row["part"], row["steps"], row["step_us"], row["kernel"], row["count"], row["ms"])
        for row in by_part(events, done)
    ]
    assert told == [
        ("refresh of 768 rows", 1, 50.0, "dot", 1.0, 0.05),
        ("reuse of 96 rows", 3, (6 * 4 + 3 * 1) / 3, "dot", 2.0, 0.008),
        ("reuse of 96 rows", 3, (6 * 4 + 3 * 1) / 3, "add", 1.0, 0.003),
    ]


def test_profilers_see_the_name_of_a_program():
    program = Program(jnp.cos, (jnp.ones(8),), {}, name="refresh of 8 rows")
    text = Executables("cpu").get(program).compiled.as_text()
    assert text is not None
    assert text.startswith("HloModule jit_refresh_of_8_rows")
