"""The Hopper head against float64, in interpret mode and on a card."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm import noise
from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.masked_logits import Level, RowPenalty, RowSampling
from jdllm.pallas.masked_logits.extremes import NO_ID
from jdllm.pallas.masked_logits.gumbel import gumbel
from jdllm.pallas.masked_logits.kernel import head_partials
from jdllm.pallas.masked_logits.limits import MAX_ROWS
from jdllm.pallas.masked_logits.merge import merge_tiles
from jdllm.pallas.masked_logits.mosaic_gpu import masked_logits_mosaic_gpu
from jdllm.pallas.masked_logits.reduction import Moments, Partials
from jdllm.pallas.masked_logits.row_table import row_table
from jdllm.pallas.masked_logits.tiles import (
    CHUNK,
    Tiles,
    padded_splits,
)
from tests.decoding import numpy_noise
from tests.pallas.masked_rows import NONE, asked, check, drawn, oracle, penalties
from tests.pallas.test_masked_logits_tiles import tile_ids

DEPTH = 128
ONE = Tiles(64, row_groups=1, column_groups=1, row_blocks=1, column_blocks=1, stages=2, processors=2)
ROW_PAIR = dataclasses.replace(ONE, row_groups=2, row_blocks=2, stages=3, processors=4)
COLUMN_PAIR = dataclasses.replace(ONE, columns=48, column_groups=2, column_blocks=2, processors=4)
SQUARE = dataclasses.replace(ONE, columns=96, row_blocks=2, column_blocks=2, processors=8)
SEED, STEP = 2**40 + 5, 3


def slow(*values: object):
    """A case for the longer lane: interpreting a kernel takes seconds."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]):
    if request.node.get_closest_marker("gpu"):
        yield
        return
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert "RACE" not in capsys.readouterr().out


def operands(rows: int, vocab: int, dtype=jnp.bfloat16, depth: int = DEPTH) -> tuple[jax.Array, jax.Array]:
    """Small integers: all sums are exact, and many logits of a row are equal."""
    rng = np.random.default_rng(rows + vocab)
    hidden, head = (jnp.asarray(rng.integers(-1, 2, (n, depth)), dtype) for n in (rows, vocab))
    return hidden, head


def exact_logits(hidden: jax.Array, head: jax.Array) -> np.ndarray:
    return np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T


def check_plain(hidden: jax.Array, head: jax.Array, count: int, tiles: Tiles | None) -> None:
    """The best token of the first `count` rows and its probability."""
    rows = asked(len(hidden), vocab=len(head))
    actual = masked_logits_mosaic_gpu(hidden, head, rows, Level.TOP, count=count, tiles=tiles)
    live = jax.tree.map(lambda x: x[:count], (actual, rows))
    check(live[0], oracle(exact_logits(hidden, head)[:count], live[1]))


def everything(rows: int, vocab: int) -> RowSampling:
    """Rows that differ in all that can be asked for; every third one has no noise."""
    rng = np.random.default_rng(rows)
    return asked(
        rows,
        vocab=vocab,
        seed=SEED,
        step=STEP,
        temperature=np.resize([0.0, 0.7, 4.0], rows),
        tempered=rng.random(rows) < 0.5,
        limit=rng.integers(vocab // 3, vocab + 1, rows),
        token_bans=rng.integers(NONE, vocab, (rows, 2)),
        confidence_bans=rng.integers(NONE, vocab, (rows, 2)),
    )


def check_everything(
    rows: int,
    vocab: int,
    level: Level,
    tiles: Tiles | None,
    depth: int = DEPTH,
    penalty: RowPenalty | None = None,
    first_id: int | None = None,
) -> None:
    hidden, head = operands(rows, vocab, depth=depth)
    logits, sampling = exact_logits(hidden, head), everything(rows, vocab)._replace(penalty=penalty)
    noise_of = drawn(SEED, STEP, rows, (first_id or 0) + vocab)[:, first_id or 0 :]
    draws = np.asarray(sampling.temperature)[:, None] * noise_of
    if first_id is not None:
        sampling = sampling._replace(first_id=np.full(rows, first_id))
    expected = oracle(logits, sampling, draws)
    assert (expected.token != oracle(logits, sampling).token).any()
    check(masked_logits_mosaic_gpu(hidden, head, sampling, level, tiles=tiles), expected, level)


@pytest.mark.parametrize("tiles", [slow(ONE), slow(ROW_PAIR), slow(COLUMN_PAIR), slow(SQUARE)])
def test_ties_and_a_ragged_vocabulary(tiles: Tiles):
    hidden, head = operands(70, 304)
    logits = exact_logits(hidden, head)
    assert ((logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1).any()
    check_plain(hidden, head, 70, tiles)


@pytest.mark.parametrize("vocab", [slow(8), slow(256), slow(264)])
def test_vocabularies_around_a_group(vocab: int):
    check_plain(*operands(3, vocab), 3, ONE)


@pytest.mark.slow
def test_float16():
    check_plain(*operands(3, 40, jnp.float16), 3, ONE)


@pytest.mark.parametrize(
    ("tiles", "level"),
    [
        (ONE, Level.MOMENTS),
        slow(ROW_PAIR, Level.TOP),
        slow(COLUMN_PAIR, Level.MOMENTS),
        slow(SQUARE, Level.TOP),
    ],
)
@pytest.mark.slow
def test_bans_limits_temperatures_and_noise_together(tiles: Tiles, level: Level):
    check_everything(70, 304, level, tiles)


@pytest.mark.parametrize("tiles", [slow(COLUMN_PAIR), ONE])
def test_the_head_may_begin_within_the_vocabulary(tiles: Tiles):
    check_everything(10, 304, Level.TOP, tiles, first_id=512)


@pytest.mark.parametrize(("tiles", "level"), [(ONE, Level.MOMENTS), (COLUMN_PAIR, Level.TOP)])
@pytest.mark.slow
def test_penalties_come_first(tiles: Tiles, level: Level):
    check_everything(70, 304, level, tiles, penalty=penalties(70, 304))


@pytest.mark.slow
def test_bans_next_to_the_edges_of_tiles():
    hidden, head = operands(64, 304)
    edges = [0, 31, 32, 127, 128, 159, 160, 255, 256, 303]
    bans = np.array([[a, b] for a in edges for b in edges][:64])
    rows = asked(64, vocab=304, token_bans=bans, confidence_bans=bans[::-1])
    actual = masked_logits_mosaic_gpu(hidden, head, rows, Level.MOMENTS, tiles=ONE)
    check(actual, oracle(exact_logits(hidden, head), rows), Level.MOMENTS)


@pytest.mark.slow
def test_a_count_beyond_the_rows_means_all_of_them():
    hidden, head = operands(5, 40)
    check_plain(hidden, head, 200, ONE)


@pytest.mark.slow
def test_one_id_left_has_no_second():
    hidden, head = operands(2, 40)
    actual = masked_logits_mosaic_gpu(hidden, head, asked(2, vocab=40, limit=1), Level.MOMENTS, tiles=ONE)
    np.testing.assert_array_equal(actual.token, [0, 0])
    np.testing.assert_array_equal(actual.total, [1, 1])
    np.testing.assert_array_equal(actual.second, [-np.inf, -np.inf])
    np.testing.assert_array_equal(actual.negative_entropy, [0, 0])


@pytest.mark.slow
def test_equal_logits_in_different_tiles():
    head = jnp.zeros((304, DEPTH), jnp.bfloat16).at[jnp.asarray([40, 170, 290]), 0].set(1)
    hidden = jnp.ones((1, DEPTH), jnp.bfloat16)
    actual = masked_logits_mosaic_gpu(hidden, head, asked(1, vocab=304), Level.MOMENTS, tiles=ONE)
    assert (int(actual.token[0]), float(actual.second[0])) == (40, 1)


def partials(hidden: jax.Array, head: jax.Array, rows: RowSampling, count: int, tiles: Tiles) -> Partials:
    table = row_table(rows, jnp.int32(count), len(head), tiles)
    return head_partials(hidden, head, jnp.int32(count), table, 2, tiles, Level.TOP)[0]


@pytest.mark.parametrize("columns", [64, slow(96), slow(128)])
@pytest.mark.slow
def test_the_kernel_draws_the_documented_bits(columns: int):
    rows, vocab, tiles = 5, 520, dataclasses.replace(ONE, columns=columns)
    zeros = [jnp.zeros((n, DEPTH), jnp.bfloat16) for n in (8, vocab)]
    sampling = asked(rows, vocab=vocab, seed=SEED, step=STEP, temperature=1.0)
    actual = partials(zeros[0], zeros[1], sampling, rows, tiles)
    draws = drawn(SEED, STEP, rows, vocab)
    for split in range(tiles.splits(vocab)):
        ids = tile_ids(tiles, split)
        ids = ids[ids < vocab]
        if len(ids) == 0:
            continue
        best = draws[:, ids].max(axis=1)
        np.testing.assert_array_equal(actual.token[split, :rows], ids[draws[:, ids].argmax(axis=1)])
        assert (np.abs(actual.score[split, :rows] - best) <= 3 * ulp(best)).all()
        assert not np.asarray(actual.logit[split, :rows]).any()


@pytest.mark.slow
@pytest.mark.parametrize("level", [slow(Level.TOP), Level.MOMENTS])
def test_the_merge_of_many_tiles(level: Level):
    """As many as two rounds of loads take, with equal scores in different tiles."""
    splits, rows, tiles, rng = 5 * CHUNK + 3, 13, ONE, np.random.default_rng(0)
    vocab = splits * ONE.columns
    asked_for = asked(rows, vocab=vocab, temperature=np.linspace(0.5, 2, rows), tempered=True)
    live = jnp.int32(11)
    table = row_table(asked_for, live, vocab, tiles)

    def written(values: np.ndarray) -> jax.Array:
        unwritten = -1 if values.dtype == np.int32 else np.nan
        whole = np.full((padded_splits(splits), tiles.padded_rows(rows)), unwritten, values.dtype)
        whole[:splits, :rows] = values
        return jnp.asarray(whole)

    shape = (splits, rows)
    score = rng.integers(-9, 2, shape).astype(np.float32)
    maximum = rng.normal(size=shape).astype(np.float32)
    token = rng.permuted(np.arange(splits * rows, dtype=np.int32).reshape(rows, splits), axis=1).T
    logit, total, below, weighted = (rng.uniform(1, 9, shape).astype(np.float32) for _ in range(4))
    # The largest two: in one tile, in tiles that a thread sees both, and in others; then of equal ones.
    maximum[50, 0], below[50, 0] = 20, 0.5
    for row, (first, other) in enumerate([(7, 7 + CHUNK), (7, 300), (9, 9 + CHUNK), (9, 300)], start=1):
        maximum[first, row], maximum[other, row] = 20, 19.5 if row < 3 else 20
    partials = Partials(*map(written, (score, token, logit, maximum, total)))
    moments = Moments(written(maximum - below), written(-weighted)) if level >= Level.MOMENTS else None
    actual = merge_tiles(partials, moments, table.words, live, 16, splits)

    divisor = np.asarray(asked_for.temperature, np.float64)
    best = np.where(score == score.max(axis=0), token, NO_ID).argmin(axis=0)
    below_top = (maximum - maximum.max(axis=0)) / divisor
    sums = (total * np.exp(below_top)).sum(axis=0)
    mean = ((-weighted * np.log(2) + below_top * total) * np.exp(below_top)).sum(axis=0) / sums
    second = np.sort(np.concatenate([maximum, maximum - below]), axis=0)[-2]
    expected = {
        "token": np.take_along_axis(token, best[None], axis=0)[0],
        "logit": np.take_along_axis(logit, best[None], axis=0)[0] / divisor,
        "maximum": maximum.max(axis=0) / divisor,
        "total": sums,
        "second": second / divisor if moments else np.zeros(rows),
        "negative_entropy": mean - np.log(sums) if moments else np.zeros(rows),
    }
    for name, values in expected.items():
        result = np.asarray(getattr(actual, name), np.float64)
        np.testing.assert_allclose(result[:live], values[:live], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_row_without_temperature_is_as_if_alone():
    hidden, head = operands(64, 304)
    noisy = asked(64, vocab=304, temperature=np.resize([0.0, 9.0], 64))
    mixed, plain = (
        masked_logits_mosaic_gpu(hidden, head, rows, Level.TOP, tiles=ONE)
        for rows in (noisy, asked(64, vocab=304))
    )
    for together, alone in zip(*map(jax.tree.leaves, (mixed, plain)), strict=True):
        np.testing.assert_array_equal(together[::2], alone[::2])
    assert (np.asarray(mixed.token)[1::2] != np.asarray(plain.token)[1::2]).any()


@pytest.mark.parametrize(("tiles", "count"), [slow(ONE, 0), slow(ROW_PAIR, 65), slow(SQUARE, 64)])
def test_rows_beyond_the_count_are_not_computed(tiles: Tiles, count: int):
    hidden, head = operands(200, 40)
    check_plain(hidden, head, count, tiles)
    maximum = np.asarray(partials(hidden, head, asked(200, vocab=40), count, tiles).maximum)
    live = -(-count // WARPGROUP_ROWS) * WARPGROUP_ROWS
    assert np.isnan(maximum[:, live:]).all()  # memory that nobody wrote
    assert not np.isnan(maximum[: tiles.splits(40), :live]).any()


class TestRefusals:
    @pytest.mark.parametrize(
        ("rows", "vocab", "depth", "dtype", "level", "reason"),
        [
            (1, 8, 64, jnp.float32, Level.TOP, "not float32"),
            (1, 8, 96, jnp.bfloat16, Level.TOP, "not 96 and 8"),
            (1, 257, 64, jnp.bfloat16, Level.TOP, "not 64 and 257"),
            (1, 8, 64, jnp.bfloat16, Level.FILTERED, "top-k"),
            (MAX_ROWS[Level.TOP] + 1, 8, 64, jnp.bfloat16, Level.TOP, "at most 2048 rows at TOP, not 2049"),
        ],
    )
    def test_names_the_limit(self, rows: int, vocab: int, depth: int, dtype, level: Level, reason: str):
        hidden, head = jnp.ones((rows, depth), dtype), jnp.ones((vocab, depth), dtype)
        with pytest.raises(NotImplementedError, match=reason):
            masked_logits_mosaic_gpu(hidden, head, asked(rows, vocab=vocab), level)

    def test_operands_of_two_types(self):
        hidden, head = jnp.ones((1, 64), jnp.float16), jnp.ones((8, 64), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="float16 and bfloat16"):
            masked_logits_mosaic_gpu(hidden, head, asked(1, vocab=8), Level.TOP)


@pytest.mark.gpu
class TestOnACard:
    @pytest.fixture(autouse=True)
    def card(self):
        assert jax.default_backend() == "gpu", "this lane needs a card"

    @pytest.mark.parametrize(
        ("rows", "count"), [(32, 32), (64, 1), (128, 100), (200, 200), (2048, 700), (2048, 0)]
    )
    def test_plain(self, rows: int, count: int):
        check_plain(*operands(rows, 20_008, depth=512), count, None)

    @pytest.mark.parametrize("level", [Level.TOP, Level.MOMENTS])
    @pytest.mark.parametrize("rows", [5, 64, 128, 300])
    def test_everything(self, rows: int, level: Level):
        check_everything(rows, 20_008, level, None, depth=512)

    @pytest.mark.parametrize("level", [Level.TOP, Level.MOMENTS])
    @pytest.mark.parametrize("rows", [5, 64, 128, 300])
    def test_penalties(self, rows: int, level: Level):
        check_everything(rows, 20_008, level, None, depth=512, penalty=penalties(rows, 20_008))

    @pytest.mark.parametrize("rows", [5, 300])
    def test_a_part_of_the_vocabulary(self, rows: int):
        check_everything(rows, 20_008, Level.MOMENTS, None, depth=512, first_id=5120)

    def test_a_higher_level_changes_nothing_that_a_lower_one_gives(self):
        hidden, head = operands(200, 20_008, depth=512)
        top, moments = (
            masked_logits_mosaic_gpu(hidden, head, everything(200, 20_008), level)
            for level in (Level.TOP, Level.MOMENTS)
        )
        for name in ("token", "logit", "maximum", "total"):
            np.testing.assert_array_equal(getattr(top, name), getattr(moments, name))
        assert not np.asarray(top.second).any()
        assert not np.asarray(top.negative_entropy).any()


def ulp(x: np.ndarray) -> np.ndarray:
    """The distance of f32 numbers at max(1, |x|)."""
    return np.spacing(np.maximum(np.abs(x), 1).astype(np.float32))


class TestGumbel:
    @staticmethod
    def check(bits: np.ndarray) -> None:
        bits = bits.astype(np.uint32)
        actual = np.asarray(gumbel(jnp.asarray(bits)), np.float64)
        exact = numpy_noise.gumbel(bits)
        assert (np.abs(actual - exact) <= 2 * ulp(exact)).all()
        portable = np.asarray(noise.gumbel(jnp.asarray(bits)), np.float64)
        assert (np.abs(actual - portable) <= 2 * ulp(portable)).all()

    @pytest.mark.slow
    def test_a_million_draws(self):
        self.check(np.random.default_rng(0).integers(0, 2**32, 1_000_000))

    @pytest.mark.parametrize("center", [0, 2**31, 2**32 // 3, 2**32 // 3 * 2, 1580030169, 2**32])
    def test_around_the_ends_and_changes_of_formula(self, center: int):
        self.check(np.clip(np.arange(center - 5000, center + 5000), 0, 2**32 - 1))
