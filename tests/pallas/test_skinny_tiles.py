"""How products of a few rows are cut, against counts by hand."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.pallas.hopper import PROCESSORS, SHARED_BYTES
from jdllm.pallas.skinny_matmul.tiles import DEPTH, MAX_ACCUMULATED, Tiles, blocks_of, default_tiles


@given(
    st.sampled_from([8, 16, 32, 40, 64]),
    st.lists(st.integers(1, 600).map(lambda i: 32 * i), min_size=1, max_size=3),
    st.integers(1, 150).map(lambda i: 2 * DEPTH * i),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(4, False), (4, True), (8, False), (16, False)]),
)
def test_default_cuts_fit_the_card(
    rows: int, outputs: list[int], k: int, gated: bool, biased: bool, kind: tuple[int, bool]
):
    bits, shifted = kind
    if gated:
        outputs, biased = outputs[:1] * 2, False
    tiles = default_tiles(rows, outputs, k, gated=gated, biased=biased, bits=bits, shifted=shifted)
    tiles.check(rows, outputs, k, gated=gated, biased=biased)
    assert tiles.shared_bytes(rows, gated) <= SHARED_BYTES
    assert (2 if gated else 1) * tiles.columns <= (MAX_ACCUMULATED if bits == 16 else 256)
    assert tiles.consumers(gated) <= (1 if bits == 16 else 4)
    assert tiles.stages >= 3


@given(st.integers(1, 400), st.integers(1, 8))
def test_every_step_has_one_part(steps: int, splits: int):
    tiles = Tiles(16, splits, 2)
    begins = [int(tiles.first_step(jnp.int32(split), steps)) for split in range(splits + 1)]
    sizes = np.diff(begins)
    assert (begins[0], begins[-1]) == (0, steps)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(
    ("outputs", "k", "options", "columns", "splits", "blocks"),
    [
        ([4096] * 3, 4096, {}, 96, 1, 129),
        ([4096] * 3, 4096, {"head_dim": 128}, 128, 1, 96),
        ([4096], 4096, {}, 64, 2, 128),
        ([12288] * 2, 4096, {"gated": True}, 96, 1, 128),
        ([4096], 12288, {}, 128, 4, 128),
        ([3584, 512, 512], 3584, {"head_dim": 128, "biased": True}, 64, 1, 72),
        ([3584], 3584, {}, 112, 4, 128),
        ([18944] * 2, 3584, {"gated": True}, 144, 1, 132),
        ([3584], 18944, {}, 112, 4, 128),
        ([4096] * 3, 4096, {"head_dim": 128, "bits": 4}, 128, 1, 96),
        ([4096], 4096, {"bits": 4}, 64, 2, 128),
        ([12288] * 2, 4096, {"gated": True, "bits": 4}, 96, 1, 128),
        ([4096], 12288, {"bits": 4}, 128, 4, 128),
        ([12288] * 2, 4096, {"gated": True, "bits": 4, "shifted": True}, 96, 1, 128),
    ],
)
def test_products_of_a_layer_take_one_wave(
    outputs: list[int], k: int, options: dict[str, Any], columns: int, splits: int, blocks: int
):
    tiles = default_tiles(32, outputs, k, **options)
    assert (tiles.columns, tiles.splits) == (columns, splits)
    assert sum(blocks_of(outputs, columns, options.get("gated", False))) * splits == blocks <= PROCESSORS


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        ((24, 1, 2), "multiple of 16 columns, at most 256, not 24"),
        ((272, 1, 2), "not 272"),
        ((32, 9, 2), "into 1 to 8 parts, not 9"),
        ((32, 1, 0), "1 to 32 stages, not 0"),
        ((32, 1, 33), "1 to 32 stages, not 33"),
    ],
)
def test_cuts_that_are_none(cut: tuple[int, int, int], reason: str):
    with pytest.raises(NotImplementedError, match=reason):
        Tiles(*cut)
