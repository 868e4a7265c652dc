"""One executable for each set of shapes and static arguments."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.compiling.executables import Executable, Executables, Program, compiler_options, temp_bytes


def scaled(x, *, factor: int):
    return x * factor


def test_compiles_once_for_each_shape_dtype_and_static_argument():
    executables = Executables("cpu")
    x = jnp.arange(3.0)
    for _ in range(2):
        np.testing.assert_array_equal(executables.call(scaled, x, factor=2), [0, 2, 4])
        assert len(executables) == 1
    np.testing.assert_array_equal(executables.call(scaled, x, factor=3), [0, 3, 6])
    assert len(executables) == 2
    np.testing.assert_array_equal(
        executables.call(scaled, np.arange(4, dtype=np.float32), factor=3), [0, 3, 6, 9]
    )
    assert len(executables) == 3
    executables.call(scaled, jnp.arange(3), factor=2)
    assert len(executables) == 4


def test_donated_arguments_are_used_up_and_others_are_not():
    executables = Executables("cpu")
    x, y = jnp.arange(3.0), jnp.arange(3.0)
    executables.call(scaled, x, factor=2)
    np.testing.assert_array_equal(executables.call(scaled, y, donate=("x",), factor=2), [0, 2, 4])
    assert y.is_deleted()
    assert not x.is_deleted()
    assert len(executables) == 2


def mixed(pool, host, weights):
    words, flags, scale = host
    return pool.at[0].add(words.sum()), (weights * scale, flags)


def test_host_arguments_among_donated_and_other_ones():
    executables = Executables("cpu")
    host = np.arange(4, dtype=np.int32), np.array([True, False]), np.float32(0.5)
    pool, weights = jnp.zeros(2, jnp.int32), jnp.arange(3.0)
    for expected in (6, 12):
        before = pool
        pool, (products, flags) = executables.call(mixed, before, host, weights, donate=("pool",))
        assert before.is_deleted()
        np.testing.assert_array_equal(pool, [expected, 0])
        np.testing.assert_array_equal(products, [0, 0.5, 1])
        np.testing.assert_array_equal(flags, host[1])
    assert not weights.is_deleted()
    assert len(executables) == 1


def test_numbers_of_the_host_may_be_sent_before_the_call():
    """A buffer of the host may be written again once it is sent, and what is on the device may change."""
    executables = Executables("cpu")
    words, weights, pool = np.arange(4, dtype=np.int32), jnp.arange(3.0), jnp.zeros(2, jnp.int32)
    args = pool, (words, np.array([True, False]), np.float32(0.5)), weights
    executable = executables.get(Program(mixed, args, {}, ("pool",)))
    abstract = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    sending = executable.sending(abstract, *args[1:])
    words[:] = 100
    for expected in (6, 12):
        pool, (products, flags) = sending(pool, *args[1:])
        np.testing.assert_array_equal(pool, [expected, 0])
        np.testing.assert_array_equal(products, [0, 0.5, 1])
        np.testing.assert_array_equal(flags, [True, False])
    assert executable(jnp.zeros(2, jnp.int32), *args[1:])[0][0] == 400


def test_host_arguments_need_an_executable_of_their_own():
    executables = Executables("cpu")
    for x in (np.arange(3, dtype=np.int32), jnp.arange(3), np.arange(1, 4, dtype=np.int32)):
        np.testing.assert_array_equal(executables.call(scaled, x, factor=2), 2 * np.asarray(x))
    assert len(executables) == 2


def test_abstract_arguments_are_those_on_the_device():
    executables = Executables("cpu")
    executable = executables.compile(scaled, jax.ShapeDtypeStruct((3,), jnp.int32), factor=2)
    np.testing.assert_array_equal(executables.call(scaled, jnp.arange(3), factor=2), [0, 2, 4])
    np.testing.assert_array_equal(executable(np.arange(3, dtype=np.int32)), [0, 2, 4])
    assert len(executables) == 1


def test_arguments_of_another_structure_are_refused():
    executable = Executables("cpu").compile(lambda pair: pair[0], (jnp.zeros(2), jnp.zeros(2)))
    with pytest.raises(TypeError, match="compiled for arguments"):
        executable([jnp.zeros(2), jnp.zeros(2)])


def test_functions_are_told_apart():
    def negated(x, *, factor: int):
        return -x * factor

    executables = Executables("cpu")
    x = jnp.arange(3.0)
    executables.call(scaled, x, factor=2)
    np.testing.assert_array_equal(executables.call(negated, x, factor=2), [0, -2, -4])


def test_what_an_executable_needs():
    def summed(x, y):
        return jnp.sin(x + 1) @ jnp.cos(y - 1), x * 2  # two buffers for the factors of the product

    x, y = jnp.zeros((256, 256)), jnp.zeros((256, 256))
    executables = Executables("cpu")
    executable = executables.compile(summed, x, y)
    one = 4 * 256 * 256
    assert executable.needs.results - 2 * one in range(64)  # and the table of the results
    assert temp_bytes(executable) == executable.needs.temporaries >= one
    donating = executables.compile(summed, x, y, donate=("x", "y"))
    assert donating.needs.results < 64


def test_xla_is_asked_once_what_an_executable_needs(monkeypatch: pytest.MonkeyPatch):
    """It takes tens of milliseconds on a card, and is asked for before every launch."""
    asked = []
    whole = jax.stages.Compiled.memory_analysis
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda c: asked.append(c) or whole(c))
    executables = Executables("cpu")
    for _ in range(3):
        executable = executables.compile(scaled, np.zeros(3), factor=2)
        assert sum(executable.needs) >= 0
    assert asked == [executable.compiled]


def test_those_used_least_recently_are_let_go():
    executables = Executables("cpu", capacity=2)
    for n in (3, 4, 3, 5, 3):
        executables.compile(scaled, np.zeros(n), factor=2)
    assert (len(executables), executables.compiled) == (2, 3)
    executables.compile(scaled, np.zeros(4), factor=2)
    assert (len(executables), executables.compiled) == (2, 4)


def test_threads_that_ask_for_one_executable_compile_it_once():
    traces, asked, released = [], threading.Barrier(5), threading.Event()

    def slow(x):
        traces.append(x)
        assert released.wait(timeout=30)
        return 2 * x

    executables = Executables("cpu")

    def compile_slow() -> Executable:
        asked.wait(timeout=30)
        return executables.compile(slow, np.zeros(3, np.float32))

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(compile_slow) for _ in range(4)]
        asked.wait(timeout=30)
        time.sleep(0.05)
        released.set()
    assert len({future.result() for future in futures}) == len(traces) == executables.compiled == 1


def test_what_cannot_be_compiled_fails_for_every_asker_and_may_be_asked_again():
    fails = [True]

    def refused(x):
        if fails:
            raise ValueError(f"{fails.pop()}")
        return x

    executables = Executables("cpu")
    with pytest.raises(ValueError, match="True"):
        executables.compile(refused, np.zeros(3))
    assert executables.call(refused, np.float32(3)) == 3
    assert (len(executables), executables.compiled) == (1, 1)


def test_programs_are_prepared_once_each():
    executables = Executables("cpu")
    executables.compile(scaled, np.zeros(2, np.float32), factor=2)
    shapes = [np.zeros(n, np.float32) for n in (2, 3, 4, 3)]
    programs = [Program(scaled, (x,), {"factor": 2}) for x in shapes]
    steps = []
    prepared = executables.prepare(
        programs,
        lambda done, _: steps.append(done),
        lambda: executables.compile(scaled, np.zeros(5), factor=2),
        threads=2,
    )
    assert (prepared.compiled, prepared.loaded, len(executables)) == (3, 0, 4)
    assert prepared.seconds > 0
    assert steps == [1, 2, 3, 4]
    np.testing.assert_array_equal(executables.call(scaled, np.ones(4, np.float32), factor=2), [2, 2, 2, 2])
    assert executables.compiled == 4


def test_a_program_that_cannot_be_prepared_is_told():
    executables = Executables("cpu")
    programs = [Program(scaled, (np.zeros(n),), {"factor": 2}) for n in (3, 4)]
    broken = Program(lambda x: jnp.reshape(x, (7,)), (np.zeros(3),), {})
    with pytest.raises(TypeError, match="reshape"):
        executables.prepare([*programs[:1], broken, *programs[1:]], threads=1)


def test_only_gpus_get_compiler_options():
    assert compiler_options("cpu") == {}
    assert compiler_options("cuda") == compiler_options("gpu") != {}


def test_programs_that_differ_in_options_are_told_apart():
    executables = Executables("cpu")
    variants: list[dict[str, Any]] = [
        {},
        {"tuned": False},
        {"chained": True},
        {"concurrent": True},
        {"donate": ("x",)},
    ]
    for options in variants:
        executables.get(Program(scaled, (np.zeros(3),), {"factor": 2}, **options))
    assert len(executables) == len(variants)
    plain = compiler_options("cuda")
    assert compiler_options("cuda", tuned=False) == plain | {"xla_gpu_autotune_level": 0}
    concurrent = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    assert compiler_options("cuda", concurrent=True) == plain | concurrent
    chained = {"xla_gpu_enable_command_buffer", "xla_gpu_enable_latency_hiding_scheduler"}
    assert compiler_options("cuda", chained=True).keys() - plain == chained


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_program_is_lowered(enabled: bool):
    seen = []

    def watched(x):
        seen.append(gc.isenabled())
        return x

    (gc.enable if enabled else gc.disable)()
    try:
        Executables("cpu").compile(watched, np.zeros(3))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False]


def test_what_takes_the_backend_longest_is_prepared_first():
    order = []

    def noted(x, *, number: int):
        order.append(number)
        return x

    programs = [Program(noted, (np.zeros(3),), {"number": n}, chained=n == 2) for n in range(4)]
    Executables("cpu").prepare(programs, threads=1)
    assert order == [2, 0, 1, 3]
