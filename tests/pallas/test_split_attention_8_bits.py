"""The Hopper kernel of Split-S attention over a pool in 8 bits, interpreted, against float64.

The oracle rounds keys and values by NumPy. Widening alone is not that of the card, which `tests/gpu` runs.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.split_attention import FRESH_UNIT
from jdllm.pallas.split_attention.limits import check_mosaic_gpu
from jdllm.pallas.split_attention.mosaic_gpu import split_attention_mosaic_gpu
from jdllm.pallas.split_attention.tiles import Tiles
from tests.pallas.split_cases import Case, case, check, oracle, rounded, with_fresh

BF16 = 2e-2
RAGGED = [[64, 10, 64], [], [0, 33], [1]]
SMALL = Tiles(stages=2, stored_stages=2, min_tiles=1, processors=2)
CUTS = {
    "one": SMALL,
    "turns": dataclasses.replace(SMALL, key_groups=2),
    "wide": dataclasses.replace(SMALL, step_tiles=2, stored_stages=1),
    "rows": dataclasses.replace(SMALL, row_groups=2, stored_stages=3),
    "blocks": dataclasses.replace(SMALL, row_blocks=2, processors=4),
    "all": Tiles(2, 2, step_tiles=2, stages=2, stored_stages=3, min_tiles=3, processors=6),
}


def slow(*values: object):
    """A case for the longer lane: interpreting a kernel takes seconds."""
    return pytest.param(*values, marks=pytest.mark.slow)


def check_rounded(
    bare: Case, tiles: Tiles | None, fresh: list[int] | None = None, unit: int = FRESH_UNIT
) -> None:
    """Attend to a case in 8 bits.

    Arguments:
    - `fresh`: how many fresh rows each request has besides, in 16 bits.
    """
    stands_for, pools = rounded(bare)
    c, rows, seen = (bare, None, None) if fresh is None else with_fresh(bare, fresh, unit)
    options = {"fresh": rows, "fresh_unit": unit, "layer": c.layer, "scale": c.scale, "tiles": tiles}
    check(split_attention_mosaic_gpu(c.q, *pools, c.table, **options), oracle(stands_for, seen), BF16)


@pytest.mark.usefixtures("interpreted")
class TestKernel:
    """Memory that nobody has written is no number here."""

    @pytest.mark.parametrize(
        "cut", [slow("one"), slow("turns"), "wide", slow("rows"), slow("blocks"), slow("all")]
    )
    def test_ragged_requests_beside_fresh_rows(self, cut: str):
        check_rounded(case(RAGGED, heads=4, kv_heads=2), CUTS[cut], [70, 5, 0, 20])

    @pytest.mark.slow
    def test_no_fresh_rows_and_no_keys(self):
        check_rounded(case(RAGGED, heads=4, kv_heads=2), SMALL)
        check_rounded(case([[], [0]]), SMALL)

    @pytest.mark.slow
    def test_a_query_of_each_request_and_its_fresh_row(self):
        c = case([[64, 10], [], [0, 33], [1], [64], [5]], queries=1, heads=8, kv_heads=2)
        check_rounded(c, SMALL, [1, 1, 1, 0, 1, 1], 1)

    @pytest.mark.slow
    def test_pages_of_many_tiles_with_dead_ones_inside(self):
        check_rounded(case([[192, 70, 0, 64], [1, 192]], page_rows=192), CUTS["turns"])

    @pytest.mark.slow
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_the_cut_by_default(self, head_dim: int):
        check_rounded(case([[64, 9], [3]], head_dim=head_dim), None, [8, 3])

    @pytest.mark.slow
    def test_the_only_row_comes_out_as_it_is_stored_whatever_its_size(self):
        c = case([[1]] * 6)
        sizes = np.zeros(c.v.shape[1])
        sizes[np.asarray(c.table.pages[:6])] = 2.0 ** np.array([-90, -40, 0, 7, 40, 90])
        c = c._replace(v=c.v * jnp.asarray(sizes, c.v.dtype)[:, None, None, None])
        stands_for, pools = rounded(c)
        options = {"layer": c.layer, "scale": c.scale, "tiles": SMALL}
        actual = split_attention_mosaic_gpu(c.q, *pools, c.table, **options)
        np.testing.assert_array_equal(np.asarray(actual.o, np.float64), oracle(stands_for).o)


def test_queries_are_of_bfloat16():
    c, (k, _) = rounded(case([[1]], dtype=jnp.float16))
    check_mosaic_gpu(c.q.astype(jnp.bfloat16), k)
    with pytest.raises(NotImplementedError, match="not float16 and float8_e4m3fn"):
        check_mosaic_gpu(c.q, k)


@pytest.mark.parametrize(("stored_stages", "stages"), [(0, 6), (2, 2)])
def test_a_cut_for_another_pool(stored_stages: int, stages: int):
    c, pools = rounded(case([[1]]))
    tiles = Tiles(stages=stages, stored_stages=stored_stages)
    k, v = (c.k, c.v) if stored_stages else pools
    with pytest.raises(NotImplementedError, match=f"{stored_stages} stages of 8 bits does not fit the pool"):
        split_attention_mosaic_gpu(c.q, k, v, c.table, layer=0, scale=1.0, tiles=tiles)
