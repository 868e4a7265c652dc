"""The masked head against float64: its bans, ties, filters, measures and sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jdllm.pallas.masked_logits import LISTED, Level, RowDecision, RowLowered, RowSampling
from jdllm.pallas.masked_logits.xla import masked_logits_xla
from tests.pallas.masked_rows import (
    NONE,
    UNFILTERED,
    VOCAB,
    asked,
    check,
    drawn,
    kept,
    no_bans,
    oracle,
    penalties,
)

jitted = jax.jit(masked_logits_xla, static_argnums=3)


def decide(logits: np.ndarray, rows: RowSampling, level: Level = Level.TOP) -> RowDecision:
    """`masked_logits_xla` for given logits: an identity matrix stands for the head."""
    head = jnp.eye(logits.shape[1], dtype=jnp.float32)
    return jitted(jnp.asarray(logits, jnp.float32), head, rows, level)


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 4, (12, VOCAB)).astype(np.float32)


def test_product_with_the_head():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(9, 32)), rng.normal(size=(VOCAB, 32))
    hidden, head = hidden.astype(np.float32), head.astype(np.float32)
    expected = oracle(hidden.astype(np.float64) @ head.T.astype(np.float64), asked(9))
    check(jitted(hidden, head, asked(9), Level.MOMENTS), expected, Level.MOMENTS)


def test_bfloat16_operands_give_f32_logits():
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=(n, 32)), jnp.bfloat16) for n in (9, VOCAB))
    exact = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    actual = jitted(hidden, head, asked(9), Level.TOP)
    assert actual.logit.dtype == jnp.float32
    check(actual, oracle(exact, asked(9)))


def test_banned_tokens_leave_the_distribution(logits: np.ndarray):
    best = np.argsort(-logits, axis=1)
    bans = no_bans(len(logits))
    bans[::2, 0] = best[::2, 0]
    bans[::4, 1] = best[::4, 1]
    rows = asked(len(logits), token_bans=bans)
    actual = decide(logits, rows)
    check(actual, oracle(logits, rows))
    assert actual.token[0] == best[0, 2]


def test_confidence_bans_leave_the_softmax_only(logits: np.ndarray):
    bans = no_bans(len(logits))
    bans[::2, 0] = logits[::2].argmax(axis=1)
    bans[1::2, 1] = 7
    rows = asked(len(logits), confidence_bans=bans)
    actual = decide(logits, rows)
    check(actual, oracle(logits, rows))
    np.testing.assert_array_equal(actual.token, logits.argmax(axis=1))
    assert (np.asarray(actual.maximum)[::2] < logits[::2].max(axis=1)).all()


def test_both_bans_together(logits: np.ndarray):
    rng = np.random.default_rng(4)
    bans = [rng.integers(NONE, VOCAB, (len(logits), 2)) for _ in range(2)]
    rows = asked(len(logits), token_bans=bans[0], confidence_bans=bans[1])
    check(decide(logits, rows, Level.MOMENTS), oracle(logits, rows), Level.MOMENTS)


def test_ids_from_the_limit_on_leave_the_distribution(logits: np.ndarray):
    limit = np.linspace(1, VOCAB, len(logits)).astype(np.int32)
    rows = asked(len(logits), limit=limit)
    actual = decide(logits, rows)
    check(actual, oracle(logits, rows))
    assert (np.asarray(actual.token) < limit).all()
    assert (logits.argmax(axis=1) >= limit).any()


@pytest.mark.parametrize("level", [Level.MOMENTS, Level.FILTERED])
def test_penalties_come_first(logits: np.ndarray, level: Level):
    best = logits.argmax(axis=1)
    filters = {"top_k": 40, "top_p": 0.9} if level is Level.FILTERED else {}
    rows = asked(
        len(logits), token_bans=np.stack([best, best], axis=1) * np.array([1, 0]) - [0, 1], **filters
    )
    rows = rows._replace(penalty=penalties(len(logits), VOCAB))
    expected = oracle(logits, rows)
    assert (expected.token != oracle(logits, rows._replace(penalty=None)).token).any()
    check(decide(logits, rows, level), expected, level)


def test_the_logit_of_one_id_of_each_row_is_lowered(logits: np.ndarray):
    """Before tokens are banned, chosen or measured; by 0 nothing is."""
    best, by = logits.argmax(axis=1), np.where(np.arange(len(logits)) % 3, 5.0, 0.0)
    exact = logits.astype(np.float64)
    exact[np.arange(len(logits)), best] -= by
    rows = asked(len(logits))
    lowered = RowLowered(best.astype(np.int32), by.astype(np.float32))
    actual = decide(logits, rows._replace(lowered=lowered), Level.FILTERED)
    check(actual, oracle(exact, rows), Level.FILTERED)
    assert ((np.asarray(actual.token) != best) & (by > 0)).any()


def test_ties_go_to_the_lowest_id():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [40, 7, 299]] = 5
    logits[1, [299, 298]] = 5
    np.testing.assert_array_equal(decide(logits, asked(3)).token, [7, 298, 0])


@pytest.mark.slow
def test_the_second_value_may_equal_the_first():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [40, 7]] = 5
    logits[1, 9] = 5
    np.testing.assert_array_equal(decide(logits, asked(2), Level.MOMENTS).second, [5, 0])


@pytest.mark.parametrize("tempered", [False, True])
def test_noise_is_that_of_the_key_and_leaves_the_measure_clean(logits: np.ndarray, tempered: bool):
    temperature = np.tile([0.0, 0.5, 1.0, 3.0], 3)
    rows = asked(len(logits), seed=2**50 + 3, step=6, temperature=temperature, tempered=tempered)
    noise = temperature[:, None] * drawn(2**50 + 3, 6, len(logits))
    expected = oracle(logits, rows, noise)
    assert (expected.token != logits.argmax(axis=1)).any()
    check(decide(logits, rows, Level.MOMENTS), expected, Level.MOMENTS)


def test_a_row_without_temperature_ignores_its_neighbours(logits: np.ndarray):
    temperature = np.zeros(len(logits))
    temperature[1::2] = 2.0
    mixed = decide(logits, asked(len(logits), temperature=temperature, tempered=True))
    np.testing.assert_array_equal(np.asarray(mixed.token)[::2], logits[::2].argmax(axis=1))
    np.testing.assert_array_equal(np.asarray(mixed.maximum)[::2], logits[::2].max(axis=1))


def test_banned_tokens_are_never_drawn():
    logits = np.zeros((400, 7), np.float32)
    bans = no_bans(400)
    bans[:, 0], bans[:, 1] = 2, 4
    token = decide(logits, asked(400, vocab=7, temperature=5.0, token_bans=bans, limit=6)).token
    assert set(np.asarray(token).tolist()) == {0, 1, 3, 5}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 12345])
def test_samples_follow_the_softmax(seed: int, temperature: float):
    logits = np.array([0.3, -1.0, 1.5, 0.0, 2.0, -2.0, 0.7])
    rows = 20_000
    token = decide(np.tile(logits, (rows, 1)), asked(rows, seed=seed, vocab=7, temperature=temperature)).token
    weights = np.exp(logits / temperature)
    counts = np.bincount(token, minlength=len(logits))
    assert stats.chisquare(counts, rows * weights / weights.sum()).pvalue > 1e-3


class TestFilters:
    @given(
        st.integers(0, 2**32 - 1),
        st.lists(st.sampled_from([0.0, 0.3, 0.8, 0.95, 1.0, UNFILTERED]), min_size=6, max_size=6),
        st.lists(st.sampled_from([1, 2, 5, 40, VOCAB]), min_size=6, max_size=6),
        st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=6, max_size=6),
        st.lists(st.sampled_from([0.0, 0.5, 1.7]), min_size=6, max_size=6),
        st.sampled_from([0.5, 4.0]),
    )
    def test_equal_float64(self, seed, top_p, top_k, min_p, temperature, spread):
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, spread, (6, VOCAB)).astype(np.float32)
        bans = rng.integers(NONE, VOCAB, (6, 2))
        rows = asked(
            6,
            seed=seed,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            temperature=temperature,
            tempered=rng.random(6) < 0.8,
            top_k_first=rng.random(6) < 0.5,
            limit=rng.integers(VOCAB // 2, VOCAB, 6),
            token_bans=bans,
        )
        noise = np.array(temperature)[:, None] * drawn(seed, 0, 6)
        check(decide(logits, rows, Level.FILTERED), oracle(logits, rows, noise), Level.FILTERED)

    @pytest.mark.parametrize(
        ("top_p", "count"), [(0.0, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.9, 4)]
    )
    def test_the_token_that_crosses_top_p_is_kept(self, top_p: float, count: int):
        weights = np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)
        actual = decide(np.log(weights), asked(1, vocab=4, top_p=top_p, tempered=True), Level.FILTERED)
        kept_mass = np.sort(weights[0])[::-1][:count].sum()
        assert float(actual.total[0]) == pytest.approx(kept_mass / 0.4, rel=1e-5)

    def test_top_p_comes_first_and_sees_the_tempered_distribution(self):
        weights = np.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]] * 3, np.float32)
        rows = asked(3, vocab=5, top_p=0.6, top_k=4, temperature=[2, 2, 0], tempered=[True, False, True])
        tempered = np.sort(weights[0] ** 0.5)[::-1]
        spent = np.cumsum(tempered) / tempered.sum()
        count = 1 + int((spent <= 0.6).sum())
        assert count == 3  # 2 in the distribution that is not tempered
        totals = np.asarray(decide(np.log(weights), rows, Level.FILTERED).total)
        np.testing.assert_allclose(totals, [tempered[:3].sum() / tempered[0], 2, 1.5], rtol=1e-5)

    def test_confidences_that_are_not_tempered_see_no_filter(self):
        weights = np.array([0.05, 0.3, 0.1, 0.35, 0.2], np.float32)
        rows = asked(200, vocab=5, temperature=5.0, top_p=0.5, seed=3)
        decision = decide(np.tile(np.log(weights), (200, 1)), rows, Level.FILTERED)
        assert set(np.asarray(decision.token).tolist()) == {1, 3, 4}  # hot, these are beyond a half first
        np.testing.assert_allclose(
            np.exp(decision.logit - decision.maximum) / decision.total, weights[decision.token], rtol=1e-5
        )

    @pytest.mark.parametrize(
        ("min_p", "count"), [(0.0, 4), (0.24, 4), (0.26, 3), (0.6, 2), (0.8, 1), (1.0, 1)]
    )
    def test_min_p_is_relative_to_the_likeliest(self, min_p: float, count: int):
        weights = np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)
        actual = decide(np.log(weights), asked(1, vocab=4, min_p=min_p, tempered=True), Level.FILTERED)
        kept_mass = np.sort(weights[0])[::-1][:count].sum()
        assert float(actual.total[0]) == pytest.approx(kept_mass / 0.4, rel=1e-5)

    def test_equal_values_at_the_end_of_top_k_all_stay(self):
        logits = np.array([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]], np.float32)
        actual = decide(logits, asked(1, vocab=6, top_k=2, tempered=True), Level.FILTERED)
        assert float(actual.total[0]) == pytest.approx(1 + 3 * np.exp(-1), rel=1e-6)

    def test_one_survivor_has_no_second(self):
        logits = np.array([[1.0, 3.0, 2.0]], np.float32)
        actual = decide(logits, asked(1, vocab=3, top_k=1, tempered=True), Level.FILTERED)
        assert (actual.total[0], actual.second[0], actual.negative_entropy[0]) == (1, -np.inf, 0)

    def test_samples_stay_inside_and_keep_their_proportions(self):
        weights, rows = np.array([0.05, 0.3, 0.1, 0.35, 0.2]), 20_000
        logits = np.tile(np.log(weights), (rows, 1))
        token = decide(logits, asked(rows, vocab=5, temperature=1.0, top_k=3, seed=3), Level.FILTERED).token
        counts = np.bincount(token, minlength=5)
        assert counts[[0, 2]].sum() == 0
        assert stats.chisquare(counts[[1, 3, 4]], rows * weights[[1, 3, 4]] / 0.85).pvalue > 1e-3


class TestLikeliest:
    """The largest measured logits, of equals the lowest id, against a sort in float64."""

    def expected(self, logits: np.ndarray, rows: RowSampling) -> list[list[tuple[int, float]]]:
        out = []
        for i, row in enumerate(np.asarray(logits, np.float64)):
            scale = float(rows.temperature[i]) or 1.0
            allowed = np.where(np.arange(len(row)) < rows.limit[i], row, -np.inf)
            allowed[rows.token_bans[i][rows.token_bans[i] != NONE]] = -np.inf
            if rows.tempered[i]:
                filters = float(rows.top_p[i]), int(rows.top_k[i]), float(rows.min_p[i])
                allowed = np.where(kept(allowed / scale, *filters), allowed / scale, -np.inf)
            allowed[rows.confidence_bans[i][rows.confidence_bans[i] != NONE]] = -np.inf
            order = np.lexsort((np.arange(len(row)), -allowed))[:LISTED]
            out.append([(int(id), allowed[id]) for id in order if allowed[id] > -np.inf])
        return out

    def listed(self, decision: RowDecision) -> list[list[tuple[int, float]]]:
        found = decision.likeliest
        assert found is not None
        pairs = zip(np.asarray(found.ids).tolist(), np.asarray(found.values).tolist(), strict=True)
        return [[one for one in zip(*row, strict=True) if one[1] > -np.inf] for row in pairs]

    def test_with_bans_ties_and_filters(self, logits: np.ndarray):
        rng, count = np.random.default_rng(7), len(logits)
        logits = np.round(logits)  # many are equal
        rows = asked(
            count,
            listed=np.arange(count) == 5,
            temperature=np.tile([0.0, 0.5, 1.0], 4),
            tempered=np.tile([True, False], 6),
            min_p=np.tile([0.02, 0.0, 0.3], 4),
            limit=np.tile([VOCAB, 250, 12], 4),
            token_bans=rng.integers(NONE, VOCAB, (count, 2)),
            confidence_bans=rng.integers(NONE, VOCAB, (count, 2)),
        )
        found, expected = self.listed(decide(logits, rows, Level.FILTERED)), self.expected(logits, rows)
        assert {len(row) for row in expected} > {LISTED}
        for mine, theirs in zip(found, expected, strict=True):
            assert [id for id, _ in mine] == [id for id, _ in theirs]
            assert [x for _, x in mine] == pytest.approx([x for _, x in theirs], rel=1e-6)

    def test_fewer_ids_than_are_listed(self):
        logits = np.array([[1.0, 3.0, 3.0, -2.0]], np.float32)
        found = self.listed(decide(logits, asked(1, vocab=4, listed=True), Level.FILTERED))
        assert found == [[(1, 3.0), (2, 3.0), (0, 1.0), (3, -2.0)]]

    def test_nothing_where_nobody_asks_and_at_lower_levels(self, logits: np.ndarray):
        rows = asked(len(logits))
        assert self.listed(decide(logits, rows, Level.FILTERED)) == [[]] * len(logits)
        assert decide(logits, rows, Level.MOMENTS).likeliest is None


class TestLevels:
    @pytest.mark.parametrize("tempered", [False, True])
    def test_a_higher_level_changes_nothing_that_a_lower_one_gives(self, logits: np.ndarray, tempered: bool):
        rng = np.random.default_rng(5)
        rows = asked(
            len(logits),
            temperature=np.tile([0.0, 1.0, 0.6], 4),
            tempered=tempered,
            token_bans=rng.integers(NONE, VOCAB, (len(logits), 2)),
            confidence_bans=rng.integers(NONE, VOCAB, (len(logits), 2)),
        )
        top, moments, filtered = (decide(logits, rows, level) for level in Level)
        for name in ("token", "logit", "maximum", "total"):
            for other in (moments, filtered):
                np.testing.assert_array_equal(getattr(other, name), getattr(top, name))
        np.testing.assert_array_equal(filtered.second, moments.second)
        np.testing.assert_array_equal(filtered.negative_entropy, moments.negative_entropy)
        assert not np.asarray(top.second).any()
        assert not np.asarray(top.negative_entropy).any()
