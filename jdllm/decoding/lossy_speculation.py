"""Lossy self-speculation of block models (S2D2): a step drafts a block, and may verify what it drafted.

Draft and verification have the same weights: in blocks of one row a block model is autoregressive. Tokens of
the draft are accepted by drawn numbers, also at temperature 0, and the first that is rejected is committed
all the same. So the tokens depend on the draft and on the seed. Source: generate_ssd_policy.py of
phymhan/S2D2, with greedy drafts and without resampling.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.head import Choice, Sources, choose, where_rows
from jdllm.decoding.speculation import up_to_the_first
from jdllm.decoding.step import AskedRows, asked_rows, evaluate
from jdllm.decoding.transfer.ranking import Candidates, RuleParams
from jdllm.decoding.transfer.select import select
from jdllm.execution.paged.forward import forward_reuse
from jdllm.execution.paged.parts import PackedParts, forward_reading
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays
from jdllm.execution.transformer import Wanted, final_norm
from jdllm.models import leaf
from jdllm.models.block import Hidden, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, head_weights
from jdllm.noise import Purpose, position_bits, step_keys, uniform
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.split_attention import PageTable

AcceptanceDraws = Callable[[Array, Array, Array, Array], Array]
"""(seed [segments, 2], step [segments], segment [head], position [head]) -> f32 in (0, 1) `[head]`."""

_LEAST = 1e-12
"""Probabilities of drafts count as this where they are lower, as published."""


class Verification(NamedTuple):
    """When the draft of each segment is verified, and what that commits.

    - `by_span`: the worth of a verification is the length of the first run of masks, instead of its score.
    - `bound`, `strict`: a draft is verified whose worth reaches the bound, or exceeds it where strict.
    - `cost`, `cost_each`: taken from the score, once or for each mask that is surer than the threshold.
    - `sharpness`: how fast expected acceptance falls with entropy.
    - `commit_sure`: whether all masks are committed too that are surer than the threshold.
    """

    by_span: Bool[Tensor, " segments"]
    bound: Float[Tensor, " segments"]
    strict: Bool[Tensor, " segments"]
    cost: Float[Tensor, " segments"]
    cost_each: Bool[Tensor, " segments"]
    sharpness: Float[Tensor, " segments"]
    commit_sure: Bool[Tensor, " segments"]


class Draft(NamedTuple):
    """What a step drafts for the head rows, in their given order.

    - `choice`: the likeliest token of each; its confidence is the negative entropy of the row.
    - `masked`: rows that are masked; all others are padding.
    - `in_span`: rows of the first run of masks in their block.
    - `sure`: rows that are surer than the threshold.
    """

    choice: Choice
    masked: Bool[Array, " head"]
    in_span: Bool[Array, " head"]
    sure: Bool[Array, " head"]

    @property
    def probability(self) -> Float[Array, " head"]:
        return jnp.exp(self.choice.logprob)


def keyed_draws(seed: Array, step: Array, segment: Array, positions: Array) -> Array:
    """The numbers that accept drafts, keyed as `jdllm.noise` describes."""
    keys = step_keys(seed, Purpose.ACCEPTANCE, step)
    return uniform(position_bits((keys[0][segment], keys[1][segment]), positions))


def draft_and_verify(
    params: Params,
    batch: Batch,
    draft_end: Int[Tensor, " rows"],
    verification: Verification,
    stored: PageTable,
    seen: PageTable,
    pool: KvArrays,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    causal: bool,
    acceptance_draws: AcceptanceDraws = keyed_draws,
) -> tuple[Trace, Bool[Array, " segments"]]:
    """Draft a block of each segment, verify the drafts that seem worth it, and commit some of their tokens.

    Arguments:
    - `params`: stacked weights.
    - `batch`: the blocks, whose head rows are all their masks. The ranges of the rows are those of a causal
      model, within their block.
    - `draft_end`: behind the last row that each row sees in a draft; read where `causal`.
    - `verification`: when drafts are verified.
    - `stored`, `seen`: the pages that each tile of rows sees, without and with the rows of its own block;
      `stored` has all tiles twice.
    - `pool`: keys and values of all requests, read only.
    - `config`, `mask_id`: the model, whose logits are not shifted; static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.
    - `level`: at least `Level.MOMENTS`, and what the segments' lists need; static.
    - `causal`: whether any row sees less of its block than all in a draft; static.
    - `acceptance_draws`: static; the source of the numbers that accept drafts. Its step is that of the
      verification, which comes behind that of the draft.

    Returns the trace of one step, and which segments were verified. Rows that a verification accepts have the
    log-probabilities of the draft.
    """
    count = len(batch.tokens)
    tokens = jnp.asarray(batch.tokens)
    asked = asked_rows(config, tokens, batch, mask_id, level)
    if causal:
        every = Wanted(jnp.arange(count), jnp.ones(count, bool))
        once = stored._replace(first=jnp.asarray(stored.first)[: len(seen.first)])
        rows = batch.rows._replace(k_end=draft_end)
        hidden = forward_reading(params, config, PackedParts(tokens, rows, None, once, None, every), pool)
    else:
        hidden = forward_reuse(params, config, tokens, batch.rows, pool, seen)
    draft = _draft(params, config, hidden, asked, batch, logits_chunks, level)
    verified = _worth_verifying(draft, batch, verification, config.vocab_size)

    def verify() -> Float[Array, " head"]:
        at = jnp.where(draft.masked, batch.head.row, count)
        filled = tokens.at[at].set(draft.choice.token, mode="drop")
        hidden = forward_reading(params, config, _with_masks(filled, batch, stored, mask_id), pool)
        return _probability(params, config, hidden, draft, batch, logits_chunks)

    nothing = jnp.zeros(len(draft.masked))
    probability = lax.cond(verified.any(), verify, lambda: nothing)
    accepted = _accepted(draft, probability, batch, acceptance_draws)
    if_verified = accepted | (draft.sure & jnp.asarray(verification.commit_sure)[batch.head.segment])
    commit = _filled_up(draft, if_verified & verified[batch.head.segment], batch)
    choice = draft.choice
    return Trace(
        jnp.int32(1), choice.token[None], commit[None], choice.logprob[None], choice.likeliest
    ), verified


def _draft(
    params: Params,
    config: ModelConfig,
    hidden: Hidden,
    asked: AskedRows,
    batch: Batch,
    logits_chunks: int,
    level: Level,
) -> Draft:
    """What the head makes of the hidden rows of blocks."""
    choice = evaluate(
        params, config, hidden, asked.sources, asked, batch, 0, chunks=logits_chunks, level=level
    )
    # A kernel leaves undefined what nobody asked for.
    choice = jax.tree.map(lambda x: where_rows(asked.masked, x[asked.place], 0), choice)
    segment, index = jnp.asarray(batch.head.segment), jnp.arange(len(asked.masked))
    size = batch.segments.step.shape[0]
    first = jnp.full(size + 1, len(index)).at[segment].min(index)[segment]
    position = jnp.asarray(batch.rows.positions)[batch.head.row]
    in_span = asked.masked & (position - position[first] == index - first)
    threshold = jnp.asarray(batch.segments.options["threshold"])[segment]
    sure = asked.masked & (jnp.exp(choice.logprob) > threshold)
    return Draft(choice, asked.masked, in_span, sure)


def _worth_verifying(
    draft: Draft, batch: Batch, verification: Verification, vocab_size: int
) -> Bool[Array, " segments"]:
    """Which segments' drafts are verified.

    The score is the number of tokens that a verification should accept, less its cost: the sum over the run
    of the products of exp(-sharpness * entropy / ln V) of its first tokens.
    """
    segment, size = jnp.asarray(batch.head.segment), batch.segments.step.shape[0]
    sharpness = jnp.asarray(verification.sharpness)[segment]
    accepts = jnp.exp(sharpness * draft.choice.confidence / jnp.log(jnp.float32(vocab_size)))
    # A line for each segment, so that sums do not depend on where a segment lies among the rows.
    position = jnp.asarray(batch.rows.positions)[batch.head.row] % PAGE_ROWS
    line = jnp.zeros((size, PAGE_ROWS)).at[segment, position]
    in_span = line.set(draft.in_span, mode="drop") > 0
    chances = jnp.where(in_span, line.set(accepts, mode="drop"), 1)
    expected = jnp.where(in_span, jnp.cumprod(chances, axis=1), 0).sum(axis=1)
    cost = jnp.asarray(verification.cost)
    score = expected - jnp.where(verification.cost_each, cost * _count(draft.sure, batch), cost)
    worth = jnp.where(verification.by_span, in_span.sum(axis=1), score)
    enough = jnp.where(verification.strict, worth > verification.bound, worth >= verification.bound)
    return enough & in_span.any(axis=1)


def _with_masks(filled: Int[Array, " rows"], batch: Batch, stored: PageTable, mask_id: int) -> PackedParts:
    """Verification: the rows of drafts, and behind them as many masks in the same positions.

    A row of a draft sees those before it in its block and itself, and a mask those before it and itself, as
    in blocks of one row. Wanted are the masks of the head rows.
    """
    rows, count = batch.rows, len(filled)
    own = jnp.arange(2 * count) >= count
    positions, start, end = (jnp.tile(jnp.asarray(x), 2) for x in rows)
    tokens = jnp.where(own, mask_id, jnp.tile(filled, 2))
    wanted = Wanted(jnp.asarray(batch.head.row) + count, jnp.ones(len(batch.head.row), bool))
    return PackedParts(
        tokens, Rows(positions, start, jnp.maximum(end - own, start)), own, stored, None, wanted
    )


def _probability(
    params: Params, config: ModelConfig, hidden: Hidden, draft: Draft, batch: Batch, logits_chunks: int
) -> Float[Array, " head"]:
    """Of the tokens of a draft, in the rows that verify them."""
    own, masks = jnp.arange(len(hidden), dtype=jnp.int32), draft.masked.sum()
    choice = choose(
        params,
        config,
        hidden,
        Sources(own, own),
        batch.head,
        jnp.asarray(batch.rows.positions)[batch.head.row],
        batch.segments,
        jnp.asarray(batch.segments.step),
        masks,
        masks,
        chunks=logits_chunks,
        level=Level.TOP,
    )
    head, h = head_weights(params), final_norm(params, config, hidden).astype(jnp.float32)
    tokens = draft.choice.token, jnp.where(draft.masked, choice.token, 0)
    drafted, likeliest = (leaf.rows(head, ids).astype(jnp.float32) for ids in tokens)
    return jnp.exp(jnp.minimum(choice.logprob + (h * (drafted - likeliest)).sum(axis=1), 0))


def _accepted(
    draft: Draft, probability: Float[Array, " head"], batch: Batch, acceptance_draws: AcceptanceDraws
) -> Bool[Array, " head"]:
    """The tokens of the first run of masks up to the first that is rejected, that one included.

    Arguments:
    - `probability`: of the tokens, in the rows that verify them.
    """
    segments, segment = batch.segments, jnp.asarray(batch.head.segment)
    position = jnp.asarray(batch.rows.positions)[batch.head.row]
    step = jnp.asarray(segments.step) + 1
    draws = acceptance_draws(jnp.asarray(segments.seed), step, segment, position)
    accepts = draws < jnp.minimum(probability / jnp.maximum(draft.probability, _LEAST), 1)
    return draft.in_span & up_to_the_first(draft.in_span & ~accepts, segment)


def _filled_up(draft: Draft, commit: Bool[Array, " head"], batch: Batch) -> Bool[Array, " head"]:
    """Rows that a verification commits, and where these are fewer than the quota others by the rule."""
    segments, segment = batch.segments, jnp.asarray(batch.head.segment)
    quota = jnp.asarray(segments.quota)[:, 0]
    missing = jnp.minimum(quota, _count(draft.masked, batch)) - _count(commit, batch)
    left = draft.masked & ~commit & (missing > 0)[segment]
    sure = draft.probability
    candidates = Candidates(left, segment, sure, sure, jnp.zeros_like(sure))
    params = RuleParams(missing, jnp.asarray(segments.fraction)[:, 0], segments.options)
    states = jax.tree.map(jnp.asarray, batch.states)
    further, _ = select(candidates, segments.rule, params, states, long_rules=False)
    return commit | further


def _count(flags: Bool[Array, " head"], batch: Batch) -> Int[Array, " segments"]:
    counts = jnp.zeros(batch.segments.step.shape[0], jnp.int32)
    return counts.at[batch.head.segment].add(flags, mode="drop")
