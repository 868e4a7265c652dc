"""One executable for each set of shapes and static arguments."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.executables import Executables, compiler_options


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
    np.testing.assert_array_equal(executables.call(scaled, y, donate=(0,), factor=2), [0, 2, 4])
    assert y.is_deleted()
    assert not x.is_deleted()
    assert len(executables) == 2


def test_functions_are_told_apart():
    def negated(x, *, factor: int):
        return -x * factor

    executables = Executables("cpu")
    x = jnp.arange(3.0)
    executables.call(scaled, x, factor=2)
    np.testing.assert_array_equal(executables.call(negated, x, factor=2), [0, -2, -4])


def test_temporaries_are_looked_up_once(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr("jdllm.decoding.executables.temp_bytes", lambda e: asked.append(e) or len(asked))
    executables = Executables("cpu")
    one, two = (executables.compile(scaled, np.zeros(n), factor=2) for n in (3, 4))
    assert [executables.temp_bytes(e) for e in (one, two, one, two)] == [1, 2, 1, 2]
    assert asked == [one, two]


def test_only_gpus_get_compiler_options():
    assert compiler_options("cpu") == {}
    assert compiler_options("cuda") == compiler_options("gpu") != {}
