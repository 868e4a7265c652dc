"""Kernels are lowered once for all that they depend on, and again where anything of that differs."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdllm.pallas import shared_lowering
from jdllm.pallas.device import Target
from jdllm.pallas.shared_lowering import LoweredKernels, lowered_once

HOPPER = Target(on_cuda=True, capability=9.0)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a traced body notes, on a card that is only described."""
    monkeypatch.setattr(shared_lowering, "target", lambda: HOPPER)
    monkeypatch.setattr(shared_lowering, "kernels", LoweredKernels(32))
    return []


def scaled(bodies: list[str]) -> Callable[..., Any]:
    @lowered_once("factor", "halved")
    def kernel(x: jax.Array, others: tuple[jax.Array, ...] = (), *, factor: int, halved: bool = False):
        bodies.append("scaled")
        return sum((x, *others)) * factor // (2 if halved else 1)

    return kernel


def ints(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_kernel_is_traced_once_for_all_functions_that_call_it(bodies: list[str]):
    kernel = scaled(bodies)
    first = jax.eval_shape(lambda x: kernel(x, factor=3), ints(4))
    second = jax.eval_shape(lambda x, y: kernel(x + y, (), factor=3, halved=False), ints(4), ints(4))
    assert (first.shape, first.dtype) == (second.shape, second.dtype) == ((4,), jnp.int32)
    assert bodies == ["scaled"]


def test_what_a_kernel_depends_on_tells_it_from_others(bodies: list[str], monkeypatch: pytest.MonkeyPatch):
    kernel = scaled(bodies)
    calls: list[Callable[[], Any]] = [
        lambda: jax.eval_shape(lambda x: kernel(x, factor=3), ints(4)),
        lambda: jax.eval_shape(lambda x: kernel(x, factor=4), ints(4)),
        lambda: jax.eval_shape(lambda x: kernel(x, factor=3, halved=True), ints(4)),
        lambda: jax.eval_shape(lambda x: kernel(x, factor=3), ints(5)),
        lambda: jax.eval_shape(lambda x: kernel(x, factor=3), ints(4, dtype=jnp.int16)),
        lambda: jax.eval_shape(lambda x: kernel(x, (x,), factor=3), ints(4)),
    ]
    for number, call in enumerate(calls, 1):
        for _ in range(2):
            call()
        assert len(bodies) == number
    jax.eval_shape(lambda x: scaled(bodies)(x, factor=3), ints(4))  # another function of the same name
    monkeypatch.setattr(shared_lowering, "target", lambda: HOPPER._replace(capability=10.0))
    calls[0]()
    assert len(bodies) == len(calls) + 2


def test_interpreted_kernels_are_called_as_they_are():
    bodies: list[str] = []
    kernel = scaled(bodies)
    assert [kernel(jnp.arange(3), factor=2).tolist() for _ in range(2)] == [[0, 2, 4]] * 2
    assert len(bodies) == 2


def test_those_go_that_were_used_least_recently():
    kernels, lowered = LoweredKernels(2), []

    def get(name: str) -> None:
        kernels.get(name, lambda: lowered.append(name) or print)

    for name in ("a", "b", "a", "c", "a", "b"):
        get(name)
    assert lowered == ["a", "b", "c", "b"]
    assert len(kernels) == 2


def test_two_threads_lower_a_kernel_once():
    kernels, start, lowered = LoweredKernels(2), threading.Barrier(2), []

    def lower() -> Callable[..., Any]:
        lowered.append(threading.get_ident())
        time.sleep(0.05)  # long enough for the other one to come
        return print

    def get(_: int) -> Callable[..., Any]:
        start.wait()
        return kernels.get("a", lower)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(get, range(2))) == [print, print]
    assert len(lowered) == 1


def test_what_failed_is_not_kept():
    kernels = LoweredKernels(2)

    def fail() -> Callable[..., Any]:
        raise ValueError("no layout")

    with pytest.raises(ValueError, match="no layout"):
        kernels.get("a", fail)
    assert kernels.get("a", lambda: print) is print
