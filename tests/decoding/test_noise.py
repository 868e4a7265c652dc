"""The noise: its generator, what it depends on, and how good its distributions are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.random import threefry2x32_p
from scipy import stats

from jdllm.noise import (
    Purpose,
    gumbel,
    position_bits,
    sample_seed,
    seed_words,
    step_keys,
    threefry,
    uniform,
    vocabulary_bits,
)
from tests.decoding import numpy_noise

WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)


generate = jax.jit(threefry)
one_key = jax.jit(step_keys, static_argnums=1)
all_bits = jax.jit(vocabulary_bits, static_argnums=2)
row_bits = jax.jit(position_bits)


def key_of(seed: int, purpose: Purpose, step: int):
    return one_key(seed_words(seed)[None], purpose, np.array([step]))


def keys_of(seed: int, purpose: Purpose, step: int, rows: int):
    return jax.tree.map(lambda word: np.repeat(word, rows), key_of(seed, purpose, step))


def token_bits(seed: int, step: int, positions: list[int], vocab_size: int) -> np.ndarray:
    keys = keys_of(seed, Purpose.TOKEN, step, len(positions))
    return np.asarray(all_bits(keys, np.asarray(positions), vocab_size))


@given(st.tuples(WORD, WORD, WORD, WORD))
def test_generator_equals_jax(words: tuple[int, int, int, int]):
    operands = np.asarray(words, np.uint32)
    expected = np.stack(threefry2x32_p.bind(*operands[:, None]))
    actual = np.stack(generate(tuple(operands[:2, None]), tuple(operands[2:, None])))
    by_hand = numpy_noise.threefry(words[:2], words[2:])
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.stack(by_hand), expected[:, 0])


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0x0123456789ABCDEF, 2**64 - 1])
def test_both_halves_of_the_seed_count(seed: int):
    high, low = seed_words(seed)
    assert int(high) << 32 | int(low) == seed


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 300, 512, 1000])
def test_documented_pairing(vocab_size: int):
    seed, step, positions = 2**40 + 77, 5, [0, 3, 100_000]
    expected = [numpy_noise.token_bits(seed, step, at, vocab_size) for at in positions]
    np.testing.assert_array_equal(token_bits(seed, step, positions, vocab_size), expected)


def test_draws_do_not_depend_on_how_rows_and_vocabulary_are_cut():
    positions = [4, 9, 2, 700, 31]
    whole = token_bits(11, 2, positions, 1000)
    np.testing.assert_array_equal(token_bits(11, 2, positions[1:3], 1000), whole[1:3])
    np.testing.assert_array_equal(token_bits(11, 2, positions[::-1], 1000), whole[::-1])
    np.testing.assert_array_equal(token_bits(11, 2, positions, 333), whole[:, :333])


def test_seed_step_position_and_purpose_each_change_the_draw():
    base = token_bits(1, 0, [5], 256)
    for other in (
        token_bits(2, 0, [5], 256),
        token_bits(1 + 2**32, 0, [5], 256),
        token_bits(1, 1, [5], 256),
        token_bits(1, 0, [6], 256),
    ):
        assert (base != other).mean() > 0.99
    assert len({int(row_bits(key_of(1, purpose, 0), np.array([5]))[0]) for purpose in Purpose}) == len(
        Purpose
    )
    assert len(np.unique(base)) == base.size


@given(SEED, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_order_draws_are_the_documented_ones(seed: int, step: int, position: int):
    bits = row_bits(key_of(seed, Purpose.ORDER, step), np.array([position]))
    assert float(uniform(bits)[0]) == pytest.approx(
        numpy_noise.order_uniform(seed, step, position), abs=2**-24
    )


@pytest.fixture(scope="module")
def bits() -> np.ndarray:
    """Rising uint32 values, dense at both ends and around the middle, log-uniform towards the ends."""
    rng = np.random.default_rng(0)
    edge = np.arange(5000)
    towards = (2 ** rng.uniform(0, 31, 100_000)).astype(np.int64)
    everywhere = rng.integers(0, 2**32, 300_000)
    parts = (edge, 2**32 - 1 - edge, 2**31 + edge, 2**31 - edge, towards, 2**32 - 1 - towards, everywhere)
    return np.unique(np.concatenate(parts)).astype(np.uint32)


class TestGumbel:
    def test_equals_float64(self, bits: np.ndarray):
        # The result is -log E with E = -log u. A relative error of E is an absolute one of the result: the
        # roundings of u (or of 1 - u in the upper half, amplified by at most 1 / log 2) and of the first
        # logarithm stay within four of 2^-24; that of the second is relative to the result.
        expected = numpy_noise.gumbel(bits)
        error = np.abs(np.asarray(gumbel(jnp.asarray(bits)), np.float64) - expected)
        assert (error <= 2.0**-22 * (1 + np.abs(expected))).all()

    def test_extremes(self):
        extremes = np.array([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1], np.uint32)
        actual = np.asarray(gumbel(jnp.asarray(extremes)))
        np.testing.assert_allclose(actual, numpy_noise.gumbel(extremes), rtol=2e-7, atol=2e-7)
        assert actual[0] == pytest.approx(-3.13, abs=0.001)
        assert actual[-1] == pytest.approx(22.874, abs=0.001)

    def test_largest_draws_are_not_cut_off(self):
        top = np.asarray(gumbel(jnp.asarray(np.arange(2**32 - 200, 2**32), jnp.uint32)))
        assert len(np.unique(top)) == 200

    def test_never_falls_with_the_bits(self, bits: np.ndarray):
        assert (np.diff(np.asarray(gumbel(jnp.asarray(bits)))) >= 0).all()

    def test_distribution(self):
        draws = np.asarray(gumbel(jnp.asarray(token_bits(3, 0, list(range(200)), 500)))).ravel()
        assert stats.kstest(draws.astype(np.float64), stats.gumbel_r.cdf).pvalue > 1e-3


class TestUniform:
    def test_strictly_inside_the_unit_interval(self, bits: np.ndarray):
        u = np.asarray(uniform(jnp.asarray(bits)))
        assert u.dtype == np.float32
        assert u.min() > 0
        assert u.max() < 1

    def test_equals_float64_up_to_rounding(self, bits: np.ndarray):
        expected = (bits.astype(np.float64) + 0.5) / 2**32
        u = np.asarray(uniform(jnp.asarray(bits)), np.float64)
        np.testing.assert_allclose(u, expected, rtol=2**-23, atol=0)

    def test_never_falls_with_the_bits(self, bits: np.ndarray):
        assert (np.diff(np.asarray(uniform(jnp.asarray(bits)))) >= 0).all()

    def test_distribution_over_positions(self):
        bits = row_bits(keys_of(9, Purpose.ORDER, 4, 20_000), np.arange(20_000))
        draws = np.asarray(uniform(bits), np.float64)
        assert stats.kstest(draws, "uniform").pvalue > 1e-3


@given(SEED, st.integers(1, 1023))
def test_the_seed_of_a_sample_is_drawn_from_the_key_of_both(seed: int, sample: int):
    high, low = numpy_noise.threefry((seed >> 32, seed & 0xFFFFFFFF), (3, sample))
    assert sample_seed(seed, sample) == int(high) << 32 | int(low)


def test_the_first_sample_has_the_plain_seed_and_no_two_the_same():
    assert sample_seed(5, 0) == 5
    assert len({sample_seed(seed, sample) for seed in (5, 6) for sample in range(20)}) == 40


def test_no_seed_is_a_fresh_one():
    assert (seed_words(None) != seed_words(None)).any()
