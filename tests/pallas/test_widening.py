"""What threads load of quantised weights and scales, against the layouts of the tensor cores' operands."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array

from jdllm.pallas.widening import named_by_bits
from jdllm.quantised import out_of_order, packed

LOADED: Any = fragmented_array.WGMMA_LAYOUT_UPCAST_2X
OPERAND: Any = mgpu.WGMMA_LAYOUT


def registers(layout: Any, values: np.ndarray, thread: int) -> np.ndarray:
    """What a thread holds of a matrix: the last axis is one register."""
    for tile in layout.tiling.tiles:
        *stack, rank = *values.shape[: -len(tile)], len(tile)
        cut = [n for size, part in zip(values.shape[-rank:], tile, strict=True) for n in (size // part, part)]
        values = values.reshape(*stack, *cut)
        outer, inner = (range(len(stack) + first, values.ndim, 2) for first in range(2))
        values = values.transpose(*range(len(stack)), *outer, *inner)
    warp, lane = divmod(thread, 32)
    (warps,) = layout.warp_dims
    values = np.take(values, [warp], axis=warps)
    for dim in reversed(layout.lane_dims):
        lane, place = divmod(lane, values.shape[dim])
        values = np.take(values, [place], axis=dim)
    return values


@pytest.mark.parametrize(("bits", "pairs"), [(8, 2), (4, 4)])
def test_each_thread_loads_the_pairs_that_it_multiplies(bits: int, pairs: int):
    """Pair `i` of a word is its numbers `i` and `i + 2` of 8 bits, or `i` and `i + 4` of 4 bits."""
    matrix = np.random.default_rng(0).integers(-8, 8, (64, 128)).astype(np.int8)
    stored = packed(jnp.asarray(matrix)) if bits == 4 else out_of_order(jnp.asarray(matrix))
    for thread in range(128):
        words = registers(LOADED, np.asarray(stored).view(np.uint8), thread).copy().view("<u4")[..., 0]
        numbers = np.stack([words >> bits * place & (1 << bits) - 1 for place in range(2 * pairs)], axis=-1)
        numbers = numbers.astype(np.int8) - 8 * (bits == 4)
        found = np.stack([numbers[..., :pairs], numbers[..., pairs:]], axis=-1)
        expected = registers(OPERAND, matrix, thread)
        assert found.size == expected.size
        # Words follow one another by 16 bytes of a row, then by rows; pairs by 8 inputs.
        by_row = found.reshape(1, -1, 2, pairs, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 2, 2)
        np.testing.assert_array_equal(by_row, expected.reshape(-1, 2, 2))


@pytest.mark.parametrize("groups", [2, 4])
def test_one_load_brings_each_thread_scales_and_offsets_of_its_columns(groups: int):
    """As `ldmatrix` is documented: eight threads name the rows of a matrix, of which, transposed, each thread
    gets two numbers of one column; four threads share a column."""
    stride = 96
    memory = np.arange(2 * groups * stride).reshape(2, groups, stride)  # scales of all groups, then offsets
    columns = np.arange(64)[:, None].repeat(8, axis=1)
    for warp in range(4):
        threads = np.arange(32) + 32 * warp
        at = np.zeros(32, int)
        for bit, moved in named_by_bits(groups, stride).items():
            at += (threads >> bit & 1) * moved
        named = memory.reshape(-1)[at[:, None] + np.arange(8)].reshape(4, 8, 8)
        for lane, thread in enumerate(threads.tolist()):
            found = named[:, lane % 4 * 2 : lane % 4 * 2 + 2, lane // 4]
            own = np.unique(registers(OPERAND, columns, thread)) % 32
            np.testing.assert_array_equal(found, memory[:, :2, own].transpose(0, 2, 1).reshape(4, 2))
