"""The head with penalties: against float64, Hugging Face's rule, vLLM's and the head without any."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.batch import SegmentParams
from jdllm.decoding.head import Choice, decide
from jdllm.decoding.penalty import Penalty
from jdllm.decoding.rules import head_level, segment_columns, segment_row
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.pallas.masked_logits import Level
from tests.decoding import numpy_noise
from tests.helpers import Golden
from tests.pallas.masked_rows import UNFILTERED, asked, kept, oracle

STEPS = np.array([0, 3, 7, 40])
PENALTIES = np.array([1.0, 1.3, 0.7, 2.5], np.float32)
GREEDY = [SamplingParams(seed=s) for s in range(4)]
SAMPLED = [
    SamplingParams(temperature=0.7, seed=2**40 + 1),
    SamplingParams(temperature=1.5, seed=5),
    SamplingParams(seed=6),
    SamplingParams(temperature=1.0, seed=7),
]
FILTERED = [
    SamplingParams(temperature=0.7, top_p=0.8, seed=1),
    SamplingParams(temperature=1.5, top_k=5, seed=2),
    SamplingParams(temperature=3.0, min_p=0.05, top_k=20, seed=3),
    SamplingParams(seed=4),
]


@functools.partial(jax.jit, static_argnames="level")
def chosen_by(head: jax.Array, *args, level: Level) -> Choice:
    return decide({"head": head}, *args, level=level)


def repeating(occurrences: np.ndarray, repetition: np.ndarray) -> Penalty:
    """Penalties for repetition alone."""
    nothing = np.zeros(len(repetition), np.float32)
    return Penalty(occurrences.astype(np.int32), repetition, nothing, nothing)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return config_from_hf(Golden("llama").directory)


def segments_of(samplings: Sequence[SamplingParams], config: ModelConfig) -> SegmentParams:
    """Segments of requests that generate: no transfer rule applies to them."""
    unused = {"step": np.int32(0), "steps_left": np.int32(1)}
    table = {"quota": np.zeros(1, np.int32), "fraction": np.zeros(1, np.float32)}
    rows = [{**segment_row(s, config), **unused, **table} for s in samplings]
    return SegmentParams(**segment_columns(rows))


def weights(config: ModelConfig, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An output matrix, and hidden rows for which it gives logits of both signs."""
    rng = np.random.default_rng(seed)
    head = rng.normal(0, 0.4, (config.vocab_size, config.hidden_size)).astype(np.float32)
    return head, rng.normal(0, 1, (rows, config.hidden_size)).astype(np.float32)


def by_hugging_face(scores: np.ndarray, input_ids: np.ndarray, penalty: float) -> np.ndarray:
    """What RepetitionPenaltyLogitsProcessor of transformers does to one row, in its words."""
    score = np.take_along_axis(scores, input_ids, axis=0)
    score = np.where(score < 0, score * penalty, score / penalty)
    scores_processed = scores.copy()
    np.put_along_axis(scores_processed, input_ids, score, axis=0)
    return scores_processed


def texts(logits: np.ndarray, likely: int = 6) -> list[np.ndarray]:
    """Ids of each request so far: its likeliest, some of them several times, and others."""
    rng = np.random.default_rng(1)
    return [
        np.concatenate([np.argsort(-row)[:likely], rng.integers(0, len(row), 200), np.argsort(-row)[:2]])
        for row in logits
    ]


def seen_in(ids: Sequence[np.ndarray], vocab: int) -> np.ndarray:
    return np.stack([np.isin(np.arange(vocab), own) for own in ids])


@pytest.mark.parametrize("samplings", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
def test_equals_float64_with_hugging_faces_rule(samplings: list[SamplingParams], config: ModelConfig):
    segment = np.array([0, 1, 2, 3, 3, 1])
    positions = np.array([9, 100, 2000, 5, 6, 31])
    head, h = weights(config, len(segment))
    logits = h.astype(np.float64) @ head.astype(np.float64).T
    ids = texts(logits[:4])
    expected = np.stack(
        [by_hugging_face(row, ids[s], float(PENALTIES[s])) for row, s in zip(logits, segment, strict=True)]
    )
    each = [samplings[s] for s in segment]
    temperature = np.array([s.temperature for s in each])
    rows = asked(
        len(segment),
        vocab=config.vocab_size,
        temperature=temperature,
        top_p=[s.top_p or UNFILTERED for s in each],
        top_k=[s.top_k or config.vocab_size for s in each],
        min_p=[s.min_p or 0 for s in each],
        top_k_first=True,
    )
    bits = [
        numpy_noise.token_bits(s.seed or 0, int(STEPS[i]), at, config.vocab_size)
        for s, i, at in zip(each, segment, positions, strict=True)
    ]
    row = oracle(expected, rows, temperature[:, None] * numpy_noise.gumbel(np.stack(bits)))
    chosen = chosen_by(
        head,
        h,
        segment,
        positions,
        segments_of(samplings, config),
        STEPS,
        len(segment),
        repeating(seen_in(ids, config.vocab_size), PENALTIES),
        level=max(map(head_level, samplings)),
    )
    np.testing.assert_array_equal(chosen.token, row.token)
    logprob = row.logit - row.maximum - np.log(row.total)
    np.testing.assert_allclose(chosen.logprob, logprob, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(chosen.confidence, np.exp(logprob), rtol=1e-5)


@pytest.mark.parametrize("samplings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_counts_are_taken_off_behind_the_repetition_penalty(
    samplings: list[SamplingParams], config: ModelConfig
):
    """vLLM's rule: frequency times count, and presence once. A segment without penalties keeps its logits."""
    head, h = weights(config, 4)
    logits = h.astype(np.float64) @ head.astype(np.float64).T
    ids, factor = texts(logits), np.array([1, 1.3, 1, 0.7], np.float32)
    presence, frequency = np.array([[0, 2, -1.5, 0.25], [0, -0.5, 1.25, 2]], np.float32)
    generated = [own[: 6 + 2 * i] for i, own in enumerate(ids)]
    counts = np.stack([np.bincount(own, minlength=config.vocab_size) for own in generated]).astype(np.int32)
    repeated = [by_hugging_face(row, own, float(f)) for row, own, f in zip(logits, ids, factor, strict=True)]
    expected = np.stack(repeated) - frequency[:, None].astype(np.float64) * counts
    expected -= np.where(counts > 0, presence[:, None], 0)
    temperature = np.array([s.temperature for s in samplings])
    positions = np.arange(4) * 31
    bits = [
        numpy_noise.token_bits(s.seed or 0, int(STEPS[i]), int(positions[i]), config.vocab_size)
        for i, s in enumerate(samplings)
    ]
    rows = asked(4, vocab=config.vocab_size, temperature=temperature)
    row = oracle(expected, rows, temperature[:, None] * numpy_noise.gumbel(np.stack(bits)))
    occurrences = seen_in(ids, config.vocab_size).astype(np.int32) + counts
    penalty = Penalty(occurrences, factor, presence, frequency)
    args = np.arange(4), positions, segments_of(samplings, config), STEPS, 4, penalty
    chosen = chosen_by(head, h, *args, level=Level.TOP)
    np.testing.assert_array_equal(chosen.token, row.token)
    logprob = row.logit - row.maximum - np.log(row.total)
    np.testing.assert_allclose(chosen.logprob, logprob, rtol=1e-5, atol=1e-5)


def test_what_is_generated_is_counted():
    occurrences, nothing = (
        np.array([[0, 2, 0, 0, 1], [0, 0, 4, 0, 0], [1, 0, 0, 0, 1]]),
        np.zeros(3, np.float32),
    )
    before = Penalty(occurrences.astype(np.int32), nothing, nothing, nothing)
    after = before.with_tokens(jnp.array([1, 2, 3]), jnp.array([True, False, True]))
    np.testing.assert_array_equal(after.occurrences, [[0, 3, 0, 0, 1], [0, 0, 4, 0, 0], [1, 0, 0, 2, 1]])


def test_filters_see_the_penalised_distribution(config: ModelConfig):
    sampling = SamplingParams(temperature=2.0, top_p=0.7, top_k=8, seed=3)
    head, h = weights(config, 1)
    logits = h.astype(np.float64) @ head.astype(np.float64).T
    ids = np.argsort(-logits[0])[:4]
    inside = kept(by_hugging_face(logits[0], ids, 4.0) / 2, 0.7, 8, 0, top_k_first=True)
    assert not inside[ids].all()
    rows, positions = np.zeros(500, int), np.arange(500)
    segments, seen = segments_of([sampling], config), seen_in([ids], config.vocab_size)
    args = rows, positions, segments, np.array([0]), 500, repeating(seen, np.array([4], np.float32))
    tokens = chosen_by(head, np.repeat(h, 500, axis=0), *args, level=Level.FILTERED).token
    assert set(np.asarray(tokens).tolist()) == set(np.flatnonzero(inside).tolist())


def test_each_sign_by_hand(config: ModelConfig):
    logits = np.array([[4.0, -1.0, 0.0, 3.0, -1.0, 2.5]], np.float32)
    seen = np.array([[True, True, True, False, False, False]])
    penalty = repeating(seen, np.array([2], np.float32))
    args = np.array([0]), np.array([0]), segments_of(GREEDY[:1], config), np.array([0]), 1, penalty
    chosen = chosen_by(np.eye(6, dtype=np.float32), logits, *args, level=Level.TOP)
    after = np.array([2.0, -2.0, 0.0, 3.0, -1.0, 2.5])
    assert chosen.token[0] == 3
    assert float(chosen.logprob[0]) == pytest.approx(3 - np.log(np.exp(after).sum()), abs=1e-6)


def test_banned_ids_stay_banned(config: ModelConfig):
    """A penalty below 1 favours what was seen, but not an id that may not be chosen."""
    head, h = weights(config, 1)
    best, second = np.argsort(-(h @ head.T)[0])[:2]
    banning = dataclasses.replace(config, eos_id=int(best))
    segments = segments_of([SamplingParams(logits_eos_inf=True)], banning)
    seen = seen_in([np.array([best, second])], config.vocab_size)
    penalty = repeating(seen, np.array([0.5], np.float32))
    args = np.array([0]), np.array([0]), segments, np.array([0]), 1, penalty
    assert chosen_by(head, h, *args, level=Level.TOP).token[0] == second


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (4, 13))])
@pytest.mark.slow
def test_without_an_effect_every_bit_is_that_of_the_head(
    rows: int, dtype: str, level: Level, config: ModelConfig
):
    samplings = FILTERED if level is Level.FILTERED else SAMPLED
    head, h = (jnp.asarray(x, dtype) for x in weights(config, rows))
    segment, positions = np.arange(rows) % 4, np.arange(rows) * 17
    args = h, segment, positions, segments_of(samplings, config), STEPS, rows
    expected = chosen_by(head, *args, level=level)
    every, none = (np.full((4, config.vocab_size), value) for value in (True, False))
    for seen, by in ((every, np.ones(4, np.float32)), (none, PENALTIES)):
        chosen = chosen_by(head, *args, repeating(seen, by), level=level)
        jax.tree.map(np.testing.assert_array_equal, chosen, expected)
    mixed = chosen_by(head, *args, repeating(every, PENALTIES), level=level)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[::4], b[::4]), mixed, expected)
    if rows > 1:
        assert (np.asarray(mixed.logprob) != np.asarray(expected.logprob)).any()
