"""Host leaves as one array of words, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.compiling.host_arguments import LARGEST, HostArguments

BITS = np.array([0, 1, 0x7FC00001, 0x7F800001, 0x80000000, 0xFFC12345, 0xFFFFFFFF], np.uint32)
"""Among them NaNs with payloads, quiet and signalling, and numbers beyond int32."""

MERGED = {
    "int32": np.array([[-1, 2, 2**31 - 1], [-(2**31), 0, 5]], np.int32),
    "uint32": BITS,
    "float32": BITS.view(np.float32),
    "bool": np.array([[True, False], [False, True]]),
    "int32 scalar": np.int32(-7),
    "uint32 scalar": np.uint32(2**32 - 1),
    "float32 scalar": np.float32(np.nan),
    "bool scalar": np.bool_(True),
    "no dimensions": np.array(3, np.int32),
    "empty": np.zeros((2, 0, 3), np.float32),
    "empty bool": np.zeros(0, bool),
    "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T,
    "strided": np.arange(9, dtype=np.float32)[::2],
    "read-only": np.broadcast_to(np.bool_(True), (2, 3)),
    "largest": np.arange(LARGEST, dtype=np.int32),
}
OTHERS = {
    "device": jnp.arange(3),
    "abstract": jax.ShapeDtypeStruct((2,), jnp.int32),
    "int64": np.arange(3),
    "float64": np.float64(0.5),
    "float16": np.ones(2, np.float16),
    "int8": np.ones(2, np.int8),
    "byte order": np.ones(2, ">i4"),
    "larger": np.zeros(LARGEST + 1, np.int32),
}


def there_and_back(leaves: list[Any]) -> list[Any]:
    host = HostArguments.of(leaves)
    words, others = host.merge(leaves)
    assert words.dtype == np.int32
    return jax.jit(host.split)(words, others)


def same_bits(actual: Any, expected: Any) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert np.asarray(actual).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", MERGED)
def test_each_leaf_comes_back_bit_by_bit(name: str):
    host = HostArguments.of([MERGED[name]])
    words, others = host.merge([MERGED[name]])
    # 256 bytes each: kernels of Mosaic refuse parts that lie elsewhere.
    assert words.shape == (-(-MERGED[name].size // 64) * 64,)
    assert others == []
    same_bits(there_and_back([MERGED[name]])[0], MERGED[name])


def test_all_leaves_keep_their_order_among_others():
    device = jnp.arange(4)
    leaves = [device, *MERGED.values(), np.ones(2, np.float16), *reversed(MERGED.values()), device + 1]
    for actual, expected in zip(there_and_back(leaves), leaves, strict=True):
        same_bits(actual, np.asarray(expected))


@pytest.mark.parametrize("name", OTHERS)
def test_other_leaves_are_left_alone(name: str):
    host = HostArguments.of([OTHERS[name], np.int32(5)])
    words, others = host.merge([OTHERS[name], np.int32(5)])
    assert words.tolist() == [5, *[0] * 63]
    assert others[0] is OTHERS[name]


@pytest.mark.parametrize("leaf", [np.zeros(3, np.float32), np.zeros((3, 1), np.int32), np.zeros(4, np.int32)])
def test_another_shape_or_type_is_refused(leaf: np.ndarray):
    host = HostArguments.of([np.zeros(3, np.int32)])
    with pytest.raises(TypeError, match="compiled for"):
        host.merge([leaf])


def test_a_device_array_may_stand_where_a_host_array_was():
    host = HostArguments.of([np.arange(3, dtype=np.int32), np.zeros(2, bool)])
    words, _ = host.merge([jnp.arange(3), jnp.array([False, True])])
    assert words.tolist() == [0, 1, 2, *[0] * 61, 0, 1, *[0] * 62]


def test_nothing_to_merge():
    words, others = HostArguments.of([]).merge([])
    assert words.shape == (0,)
    assert others == []
