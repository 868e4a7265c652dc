"""Who takes which tiles of the keys in Split-S attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.pallas.split_attention.tiles import Tiles, default_tiles
from jdllm.pallas.split_attention.work import Shape, pair_of, piece_of, share_of, usual_pieces


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([*range(1, 10), 17, 34]),
)
def test_every_tile_has_one_worker_and_every_piece_its_place(
    entries: list[int], kv_heads: int, page_tiles: int, min_tiles: int, processors: int
):
    first = jnp.asarray(np.cumsum([0, *entries]), jnp.int32)
    shape = Shape(len(entries), 8, kv_heads, 1, 64, 64, 64 * page_tiles)
    tiles = Tiles(min_tiles=min_tiles, processors=processors)
    with jax.disable_jit():
        share = share_of(first, shape, tiles)
        line, slots = [], {}
        sizes = []
        for worker in map(jnp.int32, range(processors)):
            begin, end = (int(share.begin(worker + i)) for i in range(2))
            sizes.append(end - begin)
            if begin == end:
                continue
            pairs = [int(pair_of(jnp.int32(tile), share, first, shape)) for tile in (begin, end - 1)]
            for pair in range(pairs[0], pairs[1] + 1):
                piece = piece_of(jnp.int32(pair), jnp.int32(begin), jnp.int32(end), share, first, shape)
                found = [(int(piece.head), tile) for tile in range(int(piece.begin), int(piece.end))]
                line += found
                if found:
                    assert {int(share.worker_of(jnp.int32(begin)))} == {int(worker)}
                    slots.setdefault(pair, []).append(int(worker) + pair)
    per_head = int(first[-1]) * page_tiles
    assert line == [(head, tile) for head in range(kv_heads) for tile in range(per_head)]
    taken = [slot for of_pair in slots.values() for slot in of_pair]
    assert len(set(taken)) == len(taken)
    assert all(slot < shape.pieces(tiles) for slot in taken)
    for of_pair in slots.values():
        assert of_pair == list(range(of_pair[0], of_pair[-1] + 1))
    busy = [size for size in sizes if size]
    assert not busy or max(busy) - min(busy) <= 1
    assert len(busy) == 1 or not busy or min(busy) >= min_tiles


@pytest.mark.parametrize(
    ("entries", "kv_heads", "tiles", "workers"),
    [
        ([65], 32, Tiles(), 128),
        ([1030], 8, Tiles(), 128),
        ([67], 4, Tiles(row_blocks=2), 64),
        ([70, 70], 32, Tiles(), 128),
        ([258], 8, default_tiles(128, 128), 128),  # 9 steps, where all would take 8
        ([258], 4, default_tiles(224, 128), 64),
    ],
)
def test_workers_of_equal_requests_have_one_piece_and_keep_step(
    entries: list[int], kv_heads: int, tiles: Tiles, workers: int
):
    first = jnp.asarray(np.cumsum([0, *entries]), jnp.int32)
    shape = Shape(len(entries), 32, kv_heads, 1, 128, 2048, 64)
    with jax.disable_jit():
        share = share_of(first, shape, tiles)
        begins = np.array([int(share.begin(jnp.int32(i))) for i in range(tiles.workers + 1)])
    assert int(share.workers) == workers
    assert 0 <= usual_pieces(shape, tiles) - workers // shape.pairs <= 2
    of_pair = begins[:workers].reshape(shape.pairs, -1)
    assert (of_pair - of_pair[:, :1] == of_pair[0]).all()
    assert (of_pair[:, 0] == np.arange(shape.pairs) * entries[0]).all()
    assert (begins[workers:] == entries[0] * shape.pairs).all()


@pytest.mark.parametrize(
    ("entries", "kv_heads", "tiles", "most"),
    [
        ([65] * 3, 32, Tiles(), 48),  # 96 pairs
        ([66], 8, default_tiles(128, 128), 4),  # two steps; of 128 workers, 16 would take three
        ([65], 4, default_tiles(224, 128), 4),
    ],
)
def test_workers_that_do_not_fit_the_pairs_or_would_take_longer_are_all_at_work(
    entries: list[int], kv_heads: int, tiles: Tiles, most: int
):
    shape = Shape(len(entries), 32, kv_heads, 1, 128, 2048, 64)
    with jax.disable_jit():
        share = share_of(jnp.asarray(np.cumsum([0, *entries]), jnp.int32), shape, tiles)
        begins = np.array([int(share.begin(jnp.int32(i))) for i in range(tiles.workers + 1)])
    assert int(share.workers) == tiles.workers
    assert np.diff(begins).max() == most
    ends = np.arange(1, shape.pairs + 1) * entries[0]
    pieces = [((begins[:-1] < end) & (begins[1:] > end - entries[0])).sum() for end in ends]
    assert max(pieces) <= usual_pieces(shape, tiles)
