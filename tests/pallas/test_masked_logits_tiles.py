"""How the Hopper head cuts the vocabulary into tiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.pallas.masked_logits.tiles import LOADER_REGISTERS, Tiles, counter_of, default_tiles, id_of
from tests.decoding import numpy_noise
from tests.pallas.masked_rows import NONE


class TestTiles:
    @given(st.integers(1, 16), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2000))
    def test_each_id_is_in_one_tile_beside_the_one_that_shares_its_counter(
        self, sixteenths: int, groups: int, blocks: int, vocab: int
    ):
        tiles = Tiles(16 * sixteenths, 1, groups, 1, blocks, stages=2)
        by_tile = [tile_ids(tiles, split) for split in range(tiles.splits(vocab))]
        seen = np.concatenate(by_tile)
        np.testing.assert_array_equal(np.sort(seen[seen < vocab]), np.arange(vocab))
        first, second = np.split(by_tile[-1], 2)
        np.testing.assert_array_equal(first ^ second, 128)
        assert not (first & 128).any()
        assert [tiles.split_of(int(id)) for id in first] == [len(by_tile) - 1] * len(first)
        assert tiles.split_of(NONE) < 0

    @given(st.integers(0, 2**20), st.integers(0, 1))
    def test_counters_and_ids(self, counter: int, word: int):
        id = id_of(counter, word)
        assert counter_of(id) == counter
        assert id >> 7 & 1 == word

    def test_the_halves_of_a_tile_draw_the_two_words_of_its_counters(self):
        tiles, split = Tiles(48, 1, 1, 1, 1, stages=2), 9
        counters = tiles.counter(split, 0) + np.arange(tiles.pairs)
        words = numpy_noise.threefry(numpy_noise.step_key(7, numpy_noise.TOKEN, 1), (11, counters))
        bits = numpy_noise.token_bits(7, 1, 11, 1024)
        np.testing.assert_array_equal(bits[tile_ids(tiles, split)], np.concatenate(words))

    @given(st.integers(1, 2048))
    def test_default_cuts_fit_the_card(self, rows: int):
        tiles = default_tiles(rows)
        assert tiles.stages >= 3
        assert tiles.padded_rows(rows) >= rows

    @pytest.mark.parametrize(
        ("cut", "reason"),
        [
            ((264, 1, 1, 1, 1, 2), "not 264"),
            ((24, 1, 1, 1, 1, 2), "not 24"),
            ((96, 1, 1, 4, 1, 2), "multiples of 8 rows, not 4.0"),
            ((256, 2, 1, 1, 1, 5), "5 stages of 49152 bytes"),
        ],
    )
    def test_cuts_that_a_block_cannot_load_are_refused(self, cut: tuple[int, ...], reason: str):
        with pytest.raises(NotImplementedError, match=reason):
            Tiles(*cut)

    @pytest.mark.parametrize(("consumers", "initial"), [(1, 256), (2, 168), (3, 128), (4, 96)])
    def test_warpgroups_ask_for_no_more_registers_than_their_block_has(self, consumers: int, initial: int):
        """`initial` is what a block of 65536 registers gives each thread."""
        tiles = Tiles(64, consumers, 1, 1, 1, stages=2)
        asked_for = LOADER_REGISTERS + consumers * tiles.consumer_registers
        assert asked_for <= (consumers + 1) * initial
        assert tiles.consumer_registers > initial or tiles.consumer_registers == 256


def tile_ids(tiles: Tiles, split: int) -> np.ndarray:
    """The ids of a tile, column by column."""
    runs = [
        int(tiles.first_id(split, column)) + np.arange(tiles.run)
        for column in range(0, tiles.columns, tiles.run)
    ]
    return np.concatenate(runs)
