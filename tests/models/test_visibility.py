import dataclasses

import jax
import numpy as np
import pytest

from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.visibility import block_range, causal_range, key_ranges, window_start
from tests.helpers import Golden

FULL = config_from_hf(Golden("dream").directory)
CAUSAL = config_from_hf(Golden("llama").directory)
WINDOW = config_from_hf(Golden("mistral_swa").directory)
BLOCKS = config_from_hf(Golden("sdar").directory)


def mask(config: ModelConfig, start: int, length: int, total: int) -> np.ndarray:
    """The ranges as the matrix of which row sees which key."""
    k_start, k_end = key_ranges(config, start, length)
    assert k_start.dtype == k_end.dtype == np.int32
    key = np.arange(total)
    return (key >= k_start[:, None]) & (key < k_end[:, None])


@pytest.mark.parametrize("length", [1, 11, 12, 13, 40])
@pytest.mark.parametrize("start", [0, 7])
def test_each_pattern_is_its_definition(start, length):
    total = start + length + 3
    q, k = np.arange(length)[:, None], np.arange(total) - start
    inside = (k >= 0) & (k < length)
    np.testing.assert_array_equal(mask(FULL, start, length, total), np.broadcast_to(inside, (length, total)))
    np.testing.assert_array_equal(mask(CAUSAL, start, length, total), inside & (k <= q))
    np.testing.assert_array_equal(
        mask(WINDOW, start, length, total), inside & (k <= q) & (k > q - WINDOW.sliding_window)
    )
    np.testing.assert_array_equal(mask(BLOCKS, start, length, total), inside & (k // 4 <= q // 4))


def test_a_window_longer_than_the_sequence_changes_nothing():
    wide = dataclasses.replace(WINDOW, sliding_window=40)
    np.testing.assert_array_equal(mask(wide, 3, 40, 50), mask(CAUSAL, 3, 40, 50))


@pytest.mark.parametrize("config", [CAUSAL, WINDOW])
def test_positions_on_the_device_have_the_ranges_of_the_host(config):
    traced = jax.jit(lambda position: causal_range(config, position))(np.arange(40, dtype=np.int32))
    np.testing.assert_array_equal(traced, key_ranges(config, 0, 40))


def test_blocks_on_the_device_have_the_ranges_of_the_host():
    traced = jax.jit(lambda position, length: block_range(BLOCKS, position, length))
    np.testing.assert_array_equal(traced(np.arange(39, dtype=np.int32), 39), key_ranges(BLOCKS, 0, 39))


def test_each_row_has_the_length_of_its_sequence():
    _, end = block_range(BLOCKS, np.array([0, 3, 4, 9]), np.array([9, 3, 6, 10]))
    np.testing.assert_array_equal(end, [4, 3, 6, 10])


def test_a_window_begins_where_its_keys_do():
    end, begin = np.array([70, 100]), np.array([64, 64])
    expected = np.maximum(end - WINDOW.sliding_window, begin)
    np.testing.assert_array_equal(window_start(WINDOW, end, begin), expected)
    np.testing.assert_array_equal(window_start(CAUSAL, end, begin), begin)
