"""The choice for each head row against float64: shift, guidance, bans, measures and rounding."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.batch import Batch
from jdllm.decoding.head import Choice, choose, source_rows
from jdllm.decoding.rules import head_level
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, head_weights
from jdllm.pallas.masked_logits import Level
from jdllm.serving.spec import mask_id_of
from tests.conftest import STOPS
from tests.decoding import oracle
from tests.decoding.test_against_oracle import DREAM_RULES, RAGGED, RULES
from tests.engines import infill_request, pack_all

STEP = 7
ALL = [*RAGGED.values(), *RULES.values(), *DREAM_RULES.values()]


@functools.partial(jax.jit, static_argnames=("config", "chunks", "level"))
def evaluated(
    params: Params,
    hidden: jax.Array,
    batch: Batch,
    *,
    config: ModelConfig,
    chunks: int = 1,
    level: Level = Level.FILTERED,
) -> Choice:
    """Every head row, in the same step of every request."""
    positions = jnp.asarray(batch.rows.positions)[batch.head.row]
    step = jnp.full(len(batch.segments.rule), STEP)
    count = jnp.int32(len(batch.head.row))
    sources = source_rows(config, batch.head, positions)
    rows = sources, batch.head, positions
    plain = count if level < Level.FILTERED else jnp.int32(0)
    counts = count, plain
    return choose(params, config, hidden, *rows, batch.segments, step, *counts, chunks=chunks, level=level)


def packed(samplings: Sequence[SamplingParams], config: ModelConfig) -> tuple[Batch, int]:
    """One short infill for each, with a mask at the very start, and the number of true head rows."""
    sequence = np.arange(12)
    sequence[[0, 1, 2, 4, 7, 8, 9, 11]] = mask_id_of(config)
    batch, candidates = pack_all(
        [infill_request(i, sequence, s, config) for i, s in enumerate(samplings)], config
    )
    return batch, sum(map(len, candidates))


def hidden_rows(batch: Batch, config: ModelConfig) -> np.ndarray:
    shape = (len(batch.tokens), config.hidden_size)
    return np.random.default_rng(0).normal(0, 2, shape).astype(np.float32)


def float64_logits(params: Params, config: ModelConfig, hidden: np.ndarray) -> np.ndarray:
    hidden = hidden.astype(np.float64)
    normed = hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
    return (
        normed * np.asarray(params["final_norm"], np.float64) @ np.asarray(head_weights(params), np.float64).T
    )


def check(params: Params, config: ModelConfig, samplings: Sequence[SamplingParams], ids: oracle.Ids) -> None:
    batch, count = packed(samplings, config)
    hidden = hidden_rows(batch, config)
    logits = float64_logits(params, config, hidden)
    actual = evaluated(params, hidden, batch, config=config)
    for i in range(count):
        sampling = samplings[int(batch.head.segment[i])]
        position = int(batch.rows.positions[batch.head.row[i]])
        back = 1 if ids.shift and position else 0
        guided, unguided = (logits[int(row[i]) - back] for row in (batch.head.row, batch.head.unguided))
        combined = unguided + (sampling.cfg_scale + 1) * (guided - unguided)
        token, confidence = oracle.choose(combined, position, STEP, sampling, ids)
        assert actual.token[i] == token
        assert float(actual.confidence[i]) == pytest.approx(confidence, rel=1e-4, abs=1e-5)


def test_every_rule(params: Params, config: ModelConfig):
    stops = dataclasses.replace(config, eos_id=STOPS["eos_token_id"], eot_id=STOPS["eot_token_id"])
    check(params, stops, ALL, oracle.Ids(mask=510, eos=stops.eos_id, eot=stops.eot_id))


@pytest.mark.slow
def test_every_rule_with_shifted_logits(dream_params: Params, dream_config: ModelConfig):
    known = [s for s in ALL if s.confidence_eos_eot_inf is None]
    ids = oracle.Ids(mask=509, eos=dream_config.eos_id, shift=True)
    check(dream_params, dream_config, known, ids)


def test_undefined_ids(params: Params, config: ModelConfig):
    """Of the distribution of every rule that bans them, and only of those."""
    short = dataclasses.replace(config, token_limit=300)
    samplings = [
        SamplingParams(transfer=transfer, temperature=temperature, undefined_tokens=choice)
        for transfer in ("schedule", "threshold", "entropy_bound")
        for temperature in (0.0, 1.0)
        for choice in (None, "official", "banned")
    ]
    check(params, short, samplings, oracle.Ids(mask=510, limit=300))
    batch, count = packed(samplings, short)
    chosen = evaluated(params, hidden_rows(batch, short), batch, config=short)
    tokens = np.asarray(chosen.token)[:count]
    bans = np.array([s.bans_undefined for s in samplings])[batch.head.segment[:count]]
    assert (tokens[bans] < 300).all()
    assert (tokens[~bans] >= 300).any()


@pytest.mark.parametrize("needed", [Level.TOP, Level.MOMENTS])
@pytest.mark.slow
def test_a_higher_level_chooses_the_same(needed: Level, dream_params: Params, dream_config: ModelConfig):
    samplings = [s for s in ALL if s.confidence_eos_eot_inf is None and head_level(s) <= needed]
    assert {head_level(s) for s in samplings} == {level for level in Level if level <= needed}
    batch, count = packed(samplings, dream_config)
    hidden = hidden_rows(batch, dream_config)
    runs = [
        evaluated(dream_params, hidden, batch, config=dream_config, level=level)
        for level in Level
        if level >= needed
    ]
    for other in runs[1:]:
        np.testing.assert_array_equal(other.token[:count], runs[0].token[:count])
        np.testing.assert_array_equal(other.confidence[:count], runs[0].confidence[:count])


@pytest.mark.slow
def test_chunks_choose_the_same(dream_params: Params, dream_config: ModelConfig):
    batch, count = packed([s for s in ALL if s.confidence_eos_eot_inf is None], dream_config)
    hidden = hidden_rows(batch, dream_config)
    whole, cut = (evaluated(dream_params, hidden, batch, config=dream_config, chunks=n) for n in (1, 5))
    np.testing.assert_array_equal(cut.token[:count], whole.token[:count])
    np.testing.assert_array_equal(cut.confidence[:count], whole.confidence[:count])


def test_confidences_are_rounded_to_the_dtype_of_the_weights(params: Params, config: ModelConfig):
    algs = ("maskgit_plus", "topk_margin", "entropy")
    choices = []
    for dtype in ("float32", "model"):
        samplings = [SamplingParams(alg=alg, confidence_dtype=dtype) for alg in algs]
        batch, count = packed(samplings, config)
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        hidden = jnp.asarray(hidden_rows(batch, config), jnp.bfloat16)
        choices.append(np.asarray(evaluated(low, hidden, batch, config=config).confidence)[:count])
    exact, rounded = choices
    assert (exact != rounded).any()
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16).astype(np.float32))
