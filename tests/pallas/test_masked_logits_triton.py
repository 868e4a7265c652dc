"""The head in Triton against float64, in Triton's interpreter."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm import noise
from jdllm.pallas.device import Target
from jdllm.pallas.masked_logits import Level, api, masked_logits
from jdllm.pallas.triton_launch import ProductSizes, Schedule
from tests.helpers import slow
from tests.pallas.masked_rows import asked, check, drawn, oracle, penalties
from tests.pallas.test_masked_logits_mosaic import (
    SEED,
    STEP,
    everything,
    exact_logits,
    operands,
    ulp,
)
from tests.pallas.test_masked_logits_non_finite import CASES, VOCAB
from tests.pallas.test_masked_logits_non_finite import ROWS as DAMAGED_ROWS
from tests.pallas.test_masked_logits_non_finite import check as check_finite
from tests.pallas.test_masked_logits_non_finite import operands as damaged
from tests.pallas.triton_interpreter import interpreted, launch

any_tiles = pytest.mark.parametrize("decide", [slow(64), 128], indirect=True)


@pytest.fixture(scope="module")
def triton_form() -> Iterator:
    """The module of the form, whose kernel is interpreted."""
    yield from interpreted("masked_logits")


@pytest.fixture
def decide(triton_form, request: pytest.FixtureRequest):
    pairs = getattr(request, "param", 128)
    sizes = ProductSizes(rows=16, columns=2 * pairs, depth=64, schedule=Schedule(4, 2))
    return functools.partial(triton_form.masked_logits_triton, sizes=sizes)


@any_tiles
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_ties_and_ragged_sides(decide, dtype):
    hidden, head = operands(19, 301, dtype, depth=72)
    logits = exact_logits(hidden, head)
    assert ((logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1).any()
    check(decide(hidden, head, asked(19, vocab=301), Level.TOP), oracle(logits, asked(19, vocab=301)))


@pytest.mark.parametrize("vocab", [2, 8, 256, 257])
def test_vocabularies_around_a_group(decide, vocab: int):
    hidden, head = operands(3, vocab)
    rows = asked(3, vocab=vocab)
    check(decide(hidden, head, rows, Level.TOP), oracle(exact_logits(hidden, head), rows))


@pytest.mark.slow
@any_tiles
@pytest.mark.parametrize("level", [Level.TOP, Level.MOMENTS])
def test_bans_limits_temperatures_and_noise_together(decide, level: Level):
    hidden, head = operands(21, 304)
    logits, rows = exact_logits(hidden, head), everything(21, 304)
    draws = np.asarray(rows.temperature)[:, None] * drawn(SEED, STEP, 21, 304)
    expected = oracle(logits, rows, draws)
    assert (expected.token != oracle(logits, rows).token).any()
    check(decide(hidden, head, rows, level), expected, level)


def test_the_head_may_begin_within_the_vocabulary(decide):
    """The noise is that of its ids there; bans and limits count from its first id."""
    hidden, head = operands(21, 304)
    rows = everything(21, 304)._replace(first_id=np.full(21, 512))
    draws = np.asarray(rows.temperature)[:, None] * drawn(SEED, STEP, 21, 512 + 304)
    expected = oracle(exact_logits(hidden, head), rows, draws[:, 512:])
    assert (expected.token != oracle(exact_logits(hidden, head), rows, draws[:, :304]).token).any()
    check(decide(hidden, head, rows, Level.TOP), expected)


@pytest.mark.parametrize("level", [Level.TOP, slow(Level.MOMENTS)])
def test_penalties_come_first(decide, level: Level):
    hidden, head = operands(21, 304)
    logits, rows = exact_logits(hidden, head), everything(21, 304)._replace(penalty=penalties(21, 304))
    draws = np.asarray(rows.temperature)[:, None] * drawn(SEED, STEP, 21, 304)
    expected = oracle(logits, rows, draws)
    assert (expected.token != oracle(logits, rows._replace(penalty=None), draws).token).any()
    check(decide(hidden, head, rows, level), expected, level)


@any_tiles
def test_bans_next_to_the_edges_of_tiles(decide):
    hidden, head = operands(64, 304)
    edges = [0, 31, 32, 127, 128, 159, 160, 255, 256, 303]
    bans = np.array([[a, b] for a in edges for b in edges][:64])
    rows = asked(64, vocab=304, token_bans=bans, confidence_bans=bans[::-1])
    check(decide(hidden, head, rows, Level.MOMENTS), oracle(exact_logits(hidden, head), rows), Level.MOMENTS)


@pytest.mark.slow
def test_rows_from_the_count_on_are_not_computed(decide):
    hidden, head = operands(40, 64)
    rows = asked(40, vocab=64)
    poisoned = jnp.where(jnp.arange(40)[:, None] < 5, hidden, jnp.nan)
    actual = decide(poisoned, head, rows, Level.TOP, count=5)
    live = jax.tree.map(lambda x: x[:5], (actual, rows))
    check(live[0], oracle(exact_logits(hidden, head)[:5], live[1]))
    everyone = decide(hidden, head, rows, Level.TOP, count=200)
    check(everyone, oracle(exact_logits(hidden, head), rows))


def test_one_id_left_has_no_second(decide):
    hidden, head = operands(2, 40)
    actual = decide(hidden, head, asked(2, vocab=40, limit=1), Level.MOMENTS)
    np.testing.assert_array_equal(actual.token, [0, 0])
    np.testing.assert_array_equal(actual.total, [1, 1])
    np.testing.assert_array_equal(actual.second, [-np.inf, -np.inf])
    np.testing.assert_array_equal(actual.negative_entropy, [0, 0])


@pytest.mark.slow
@any_tiles
def test_equal_logits_in_different_tiles(decide):
    head = jnp.zeros((304, 64), jnp.bfloat16).at[jnp.asarray([40, 170, 290]), 0].set(1)
    actual = decide(jnp.ones((1, 64), jnp.bfloat16), head, asked(1, vocab=304), Level.MOMENTS)
    assert (int(actual.token[0]), float(actual.second[0])) == (40, 1)


def test_a_row_without_temperature_ignores_its_neighbours(decide):
    hidden, head = operands(8, 64)
    temperature = np.resize([0.0, 2.0], 8)
    mixed = decide(hidden, head, asked(8, vocab=64, temperature=temperature), Level.TOP)
    plain = decide(hidden, head, asked(8, vocab=64), Level.TOP)
    for name in ("token", "logit", "maximum", "total"):
        np.testing.assert_array_equal(getattr(mixed, name)[::2], getattr(plain, name)[::2])


@pytest.mark.parametrize(("where", "value"), CASES)
def test_infinite_operands_give_no_finite_probability(decide, where: str, value: float):
    rows = asked(DAMAGED_ROWS, vocab=VOCAB)
    actual = decide(*damaged(where, value), rows, Level.TOP)
    check_finite(actual, where)
    assert ((np.asarray(actual.token) >= 0) & (np.asarray(actual.token) < VOCAB)).all()


@pytest.mark.slow
def test_the_noise_is_the_documented_one(triton_form):
    """With a head of zeros each part's score is its largest draw."""
    rows, vocab = 5, 520
    sizes = ProductSizes(rows=16, columns=128, depth=64, schedule=Schedule(4, 2))
    zeros = [jnp.zeros((n, 64), jnp.bfloat16) for n in (rows, vocab)]
    kept = []

    def keep(*args, **constants):
        kept.extend(launch(*args, **constants))
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_form, "launch", keep)
        asked_for = asked(rows, vocab=vocab, seed=SEED, step=STEP, temperature=1.0)
        triton_form.masked_logits_triton(*zeros, asked_for, Level.TOP, sizes=sizes)
    partials = triton_form.Partials(*kept)
    draws = drawn(SEED, STEP, rows, vocab)
    best = np.take_along_axis(draws, np.asarray(partials.token).clip(max=vocab - 1).T, axis=1).T
    reached = np.asarray(partials.token) < vocab
    assert reached.any()
    assert (np.abs(np.asarray(partials.score) - best) <= 3 * ulp(best))[reached].all()
    np.testing.assert_array_equal(partials.score.max(axis=0).argmax(), best.max(axis=0).argmax())


def test_sizes_for_every_card(triton_form):
    for capability in (None, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0, 99.0):
        for itemsize in (2, 4):
            for rows in (1, 16, 33, 128, 4096):
                sizes = triton_form.sizes_for(rows, itemsize, capability)
                assert 256 % sizes.columns == 0
                assert sizes.rows >= 16


class TestChoice:
    @pytest.fixture(autouse=True)
    def a100(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(api, "target", lambda: Target(True, 8.0))

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"level": Level.FILTERED}, "does not filter"),
            ({"dtype": jnp.float16}, "not float16 and bfloat16"),
        ],
    )
    def test_the_limits_of_the_kernel(self, change: dict, reason: str):
        hidden, head = operands(3, 40)
        hidden = hidden.astype(change.get("dtype", hidden.dtype))
        with pytest.raises(NotImplementedError, match=reason):
            masked_logits(
                hidden, head, asked(3, vocab=40), change.get("level", Level.TOP), implementation="triton"
            )

    def test_not_before_ampere(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(api, "target", lambda: Target(True, 7.5))
        with pytest.raises(NotImplementedError, match="Ampere and newer"):
            masked_logits(*operands(3, 40), asked(3, vocab=40), Level.TOP, implementation="triton")


@pytest.mark.slow
def test_bits_of_the_generator(triton_form):
    """Against JAX's own form, through the kernel's tokens: many rows, positions and steps."""
    rows, vocab = 32, 256
    sizes = ProductSizes(rows=16, columns=256, depth=64, schedule=Schedule(4, 2))
    zeros = [jnp.zeros((n, 64), jnp.bfloat16) for n in (rows, vocab)]
    for seed in (0, 2**63 + 12345):
        asked_for = asked(rows, vocab=vocab, seed=seed, step=7, temperature=1.0)
        bits = noise.vocabulary_bits(asked_for.keys, jnp.asarray(asked_for.positions), vocab)
        actual = triton_form.masked_logits_triton(*zeros, asked_for, Level.TOP, sizes=sizes)
        np.testing.assert_array_equal(actual.token, noise.gumbel(bits).argmax(axis=1))
