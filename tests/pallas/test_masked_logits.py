"""The masked head against float64, its bans, ties and sampling."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jdllm.decoding.noise import Purpose, seed_words, step_keys
from jdllm.pallas.masked_logits import RowDecision, TokenNoise, masked_logits
from tests.decoding import numpy_noise

VOCAB = 300
NONE = -1


class Expected(NamedTuple):
    token: np.ndarray
    logit: np.ndarray
    maximum: np.ndarray
    total: np.ndarray


def noise(temperature: np.ndarray, seed: int = 0, step: int = 0) -> TokenNoise:
    rows = len(temperature)
    keys = step_keys(jnp.asarray([seed_words(seed)]), Purpose.TOKEN, jnp.asarray([step]))
    per_row = jax.tree.map(lambda word: jnp.repeat(word, rows), keys)
    return TokenNoise(per_row, jnp.arange(rows), jnp.asarray(temperature, jnp.float32))


def oracle(logits: np.ndarray, token_bans: np.ndarray, confidence_bans: np.ndarray) -> Expected:
    """Temperature 0, row by row, in float64."""
    rows = []
    for row, banned, unmeasured in zip(logits, token_bans, confidence_bans, strict=True):
        allowed = row.astype(np.float64)
        allowed[banned[banned != NONE]] = -np.inf
        measured = allowed.copy()
        measured[unmeasured[unmeasured != NONE]] = -np.inf
        token = int(allowed.argmax())
        rows.append((token, allowed[token], measured.max(), np.exp(measured - measured.max()).sum()))
    return Expected(*map(np.array, zip(*rows, strict=True)))


def no_bans(rows: int) -> np.ndarray:
    return np.full((rows, 2), NONE)


def decide(logits: np.ndarray, token_noise: TokenNoise, token_bans=None, confidence_bans=None) -> RowDecision:
    """`masked_logits` for given logits: an identity matrix stands for the head."""
    bans = [no_bans(len(logits)) if b is None else b for b in (token_bans, confidence_bans)]
    head = jnp.eye(logits.shape[1], dtype=jnp.float32)
    return jax.jit(masked_logits)(jnp.asarray(logits, jnp.float32), head, token_noise, *bans)


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 4, (12, VOCAB)).astype(np.float32)


def check(actual: RowDecision, expected: Expected) -> None:
    np.testing.assert_array_equal(actual.token, expected.token)
    for name in ("logit", "maximum", "total"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=2e-6, err_msg=name)


def test_product_with_the_head():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(9, 32)), rng.normal(size=(VOCAB, 32))
    hidden, head = hidden.astype(np.float32), head.astype(np.float32)
    expected = oracle(hidden.astype(np.float64) @ head.T.astype(np.float64), no_bans(9), no_bans(9))
    check(jax.jit(masked_logits)(hidden, head, noise(np.zeros(9)), no_bans(9), no_bans(9)), expected)


def test_bfloat16_operands_give_f32_logits():
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=(n, 32)), jnp.bfloat16) for n in (9, VOCAB))
    exact = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    expected = oracle(exact, no_bans(9), no_bans(9))
    actual = jax.jit(masked_logits)(hidden, head, noise(np.zeros(9)), no_bans(9), no_bans(9))
    assert actual.logit.dtype == jnp.float32
    check(actual, expected)


def test_banned_tokens_leave_the_distribution(logits: np.ndarray):
    best = np.argsort(-logits, axis=1)
    bans = no_bans(len(logits))
    bans[::2, 0] = best[::2, 0]
    bans[::4, 1] = best[::4, 1]
    actual = decide(logits, noise(np.zeros(len(logits))), token_bans=bans)
    check(actual, oracle(logits, bans, no_bans(len(logits))))
    assert actual.token[0] == best[0, 2]


def test_confidence_bans_leave_the_softmax_only(logits: np.ndarray):
    bans = no_bans(len(logits))
    bans[::2, 0] = logits[::2].argmax(axis=1)
    bans[1::2, 1] = 7
    actual = decide(logits, noise(np.zeros(len(logits))), confidence_bans=bans)
    check(actual, oracle(logits, no_bans(len(logits)), bans))
    np.testing.assert_array_equal(actual.token, logits.argmax(axis=1))
    assert (np.asarray(actual.maximum)[::2] < logits[::2].max(axis=1)).all()


def test_both_bans_together(logits: np.ndarray):
    rng = np.random.default_rng(4)
    bans = [rng.integers(NONE, VOCAB, (len(logits), 2)) for _ in range(2)]
    check(decide(logits, noise(np.zeros(len(logits))), *bans), oracle(logits, *bans))


def test_ties_go_to_the_lowest_id():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [40, 7, 299]] = 5
    logits[1, [299, 298]] = 5
    np.testing.assert_array_equal(decide(logits, noise(np.zeros(3))).token, [7, 298, 0])


def test_noise_is_that_of_the_key_and_leaves_the_measure_clean(logits: np.ndarray):
    temperature = np.tile([0.0, 0.5, 1.0, 3.0], 3)
    actual = decide(logits, noise(temperature, seed=2**50 + 3, step=6))
    drawn = np.stack(
        [numpy_noise.gumbel(numpy_noise.token_bits(2**50 + 3, 6, row, VOCAB)) for row in range(len(logits))]
    )
    token = (logits + temperature[:, None] * drawn).argmax(axis=1)
    clean = oracle(logits, no_bans(len(logits)), no_bans(len(logits)))
    assert (token != logits.argmax(axis=1)).any()
    check(actual, clean._replace(token=token, logit=logits[np.arange(len(logits)), token]))


def test_a_row_without_temperature_ignores_its_neighbours(logits: np.ndarray):
    temperature = np.zeros(len(logits))
    temperature[1::2] = 2.0
    mixed = decide(logits, noise(temperature))
    np.testing.assert_array_equal(np.asarray(mixed.token)[::2], logits[::2].argmax(axis=1))


def test_banned_tokens_are_never_drawn():
    logits = np.zeros((400, 5), np.float32)
    bans = no_bans(400)
    bans[:, 0], bans[:, 1] = 2, 4
    token = decide(logits, noise(np.full(400, 5.0)), token_bans=bans).token
    assert set(np.asarray(token).tolist()) == {0, 1, 3}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 12345])
def test_samples_follow_the_softmax(seed: int, temperature: float):
    logits = np.array([0.3, -1.0, 1.5, 0.0, 2.0, -2.0, 0.7])
    rows = 20_000
    token = decide(np.tile(logits, (rows, 1)), noise(np.full(rows, temperature), seed)).token
    weights = np.exp(logits / temperature)
    counts = np.bincount(token, minlength=len(logits))
    assert stats.chisquare(counts, rows * weights / weights.sum()).pvalue > 1e-3
