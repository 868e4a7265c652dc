"""Adaptive parallel decoding: the diffusion model drafts, an autoregressive model says how far to believe it.

Left to right: of the next masked positions the draft is accepted up to the first one where the mixture of
both models would have chosen another token. Draft and mixture share their noise, so that with a temperature
agreement couples the two distributions (the published code forgets the noise of the mixture, quirk Q17).
Source: "Accelerating diffusion LLMs via adaptive parallel decoding", and danielmisrael/apd.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jdllm.arrays import Tensor
from jdllm.chunks import ChunkConfig
from jdllm.decoding.batch import HeadRows, Trace
from jdllm.decoding.head import source_rows
from jdllm.decoding.unseen import taken
from jdllm.execution.paged.decode import Window, forward_decode
from jdllm.execution.paged.place import Place
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.transformer import forward, logits
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.noise import Purpose, step_keys
from jdllm.pallas.masked_logits.types import Keys, Likeliest
from jdllm.pallas.masked_logits.xla import allowed, drawn, likeliest

Cut = Callable[[Array], Array]
"""Cuts the rows of one chunk out of a column of all head rows."""


class Drawn(NamedTuple):
    """The token of each row, and its log-probability, or the log-probability of another token that was asked
    for; for such tokens also the likeliest ids of the row, with log-probabilities."""

    token: Int[Array, " rows"]
    logprob: Float[Array, " rows"]
    likeliest: Likeliest | None


class Models(NamedTuple):
    """The weights of the diffusion model and of its verifier, and what both are."""

    params: Params
    verifier: Params
    config: ModelConfig
    verifier_config: ModelConfig


class AdaptiveSegments(NamedTuple):
    """What each segment asks for.

    - `seed`: two words of the request's seed.
    - `step`: denoising steps that the request has behind it.
    - `temperature`: of the tokens, 0 for no noise.
    - `limit`: ids from here on are removed from the distribution.
    - `token_bans`: ids removed from the distribution; -1 stands for none.
    - `listed`: rows whose likeliest ids are wanted.
    - `mixture_weight`: share of the diffusion model's logits in the mixture, from 0 to 1.
    """

    seed: UInt32[Tensor, "segments 2"]
    step: Int[Tensor, " segments"]
    temperature: Float[Tensor, " segments"]
    limit: Int[Tensor, " segments"]
    token_bans: Int[Tensor, "segments bans"]
    listed: Bool[Tensor, " segments"]
    mixture_weight: Float[Tensor, " segments"]


class Verified(NamedTuple):
    """Rows that the verifier evaluates.

    - `positions`: their positions.
    - `place`: where their keys and values are stored, no two in the same place.
    - `seen`: the pages or ranges of rows that each row sees, itself included.
    """

    positions: RowInts
    place: Place
    seen: Window


class AdaptiveBatch(NamedTuple):
    """One packed batch for both models.

    - `tokens`: that the diffusion model evaluates, masks included: whole sequences, or of cached ones the
      rows that are not stored.
    - `rows`: as the diffusion model sees them.
    - `verified`: as the verifier sees each segment from the row before its first head row to the one before
      its last; the rows before them are stored.
    - `verified_tokens`: of these rows, where they are known.
    - `drafted_by`: the head row whose draft is the token of each of them; -1 where it is known.
    - `verified_from`: which of them predicts each head row.
    - `head`: each segment's window, its next masked rows, rising; `unguided` is not read.
    - `segments`: their parameters.
    """

    tokens: Int[Tensor, " rows"]
    rows: Rows
    verified: Verified
    verified_tokens: Int[Tensor, " verified"]
    drafted_by: Int[Tensor, " verified"]
    verified_from: Int[Tensor, " head"]
    head: HeadRows
    segments: AdaptiveSegments


def read(
    verifier: Params, tokens: RowInts, rows: Verified, pool: KvArrays, *, config: ModelConfig
) -> tuple[Int[Array, ""], KvArrays]:
    """Store rows of prompts for the verifier.

    Arguments:
    - `verifier`, `config`: its weights, and what it is; static.
    - `tokens`, `rows`: the rows.
    - `pool`: stored keys and values of the rows before them; returned, so donate it.

    Returns 0, and the pool.
    """
    _, pool = _evaluate(verifier, config, tokens, rows, pool)
    return jnp.int32(0), pool


def denoise_adaptive(
    params: Params,
    verifier: Params,
    batch: AdaptiveBatch,
    pool: KvArrays,
    *,
    config: ModelConfig,
    verifier_config: ModelConfig,
    chunks: ChunkConfig,
) -> tuple[Trace, KvArrays]:
    """One iteration: draft the window of every segment, verify it and accept a prefix.

    Arguments:
    - `params`, `verifier`: stacked weights of the diffusion model and of the autoregressive one.
    - `batch`: the packed batch.
    - `pool`: of the verifier; given back, donate it.
    - `config`, `verifier_config`, `chunks`: static. Chunk counts are for the diffusion model; logits of
      both models exist for one chunk of the head rows at a time.

    Returns a trace of one step: the draft, and which of it was accepted, at least the first of each segment;
    and the pool. Tokens come from the smaller vocabulary. Exact: the diffusion model evaluates whole
    sequences, and what the verifier has stored does not depend on what follows.
    """
    hidden = forward(params, config, batch.tokens, batch.rows, chunks=chunks)
    models = Models(params, verifier, config, verifier_config)
    return verify_draft(models, batch, hidden, sources_of(config, batch), pool, chunks=chunks.logits)


def sources_of(config: ModelConfig, batch: AdaptiveBatch) -> Int[Array, " head"]:
    """The packed rows that predict the head rows."""
    positions = jnp.asarray(batch.rows.positions)[batch.head.row]
    return jnp.asarray(source_rows(config, batch.head, positions).guided)


def real_rows(batch: AdaptiveBatch) -> Bool[Array, " head"]:
    """Which head rows are no padding."""
    return jnp.asarray(batch.head.segment) < batch.segments.step.shape[0]


def verify_draft(
    models: Models,
    batch: AdaptiveBatch,
    hidden: Hidden,
    drafted_from: Int[Array, " head"],
    pool: KvArrays,
    *,
    chunks: int,
) -> tuple[Trace, KvArrays]:
    """Draft the window of every segment from hidden rows, verify the draft and accept a prefix.

    Arguments:
    - `models`, `batch`: both models, and the packed batch.
    - `hidden`: rows behind the diffusion model's last layer.
    - `drafted_from`: which of them predict the head rows.
    - `pool`: of the verifier; it is written.
    - `chunks`: into how many chunks the head rows are cut, of one of which logits exist at a time; static.

    Returns a trace of one step, and the pool.
    """
    params, verifier, config, verifier_config = models
    head, segments, real = batch.head, batch.segments, real_rows(batch)
    total = head.row.shape[0]
    size = -(-total // chunks)
    positions = jnp.asarray(batch.rows.positions)[head.row]
    verified_from = jnp.asarray(batch.verified_from)
    keys = step_keys(jnp.asarray(segments.seed), Purpose.TOKEN, jnp.asarray(segments.step))
    of_row: tuple[AdaptiveSegments, Keys] = jax.tree.map(
        lambda x: jnp.asarray(x)[head.segment], (segments, keys)
    )
    common = min(config.vocab_size, verifier_config.vocab_size)

    def in_chunks(choose: Callable[[Cut], Drawn]) -> Drawn:
        return _in_chunks(choose, total, size, real.sum())

    def draft_logits(part: Cut) -> Float[Array, "part common"]:
        return logits(params, config, hidden[part(drafted_from)])[:, :common]

    def draw(values: Float[Array, "part common"], part: Cut, of: Int[Array, " head"] | None = None) -> Drawn:
        chosen = None if of is None else part(of)
        return _draw(values, part(positions), *jax.tree.map(part, of_row), of=chosen)

    def draft(part: Cut) -> Drawn:
        return draw(draft_logits(part), part)

    def target(part: Cut) -> Drawn:
        verified = logits(verifier, verifier_config, hidden_of_draft[part(verified_from)])[:, :common]
        weight = part(jnp.asarray(of_row[0].mixture_weight))[:, None]
        mixture = weight * draft_logits(part) + (1 - weight) * verified
        return draw(mixture, part, drafts)

    drafts = in_chunks(draft).token
    asked = taken(batch.verified_tokens, drafts, batch.drafted_by)
    # No row sees the masks beyond the draft, whose id the verifier may lack.
    asked = jnp.minimum(asked, verifier_config.vocab_size - 1)
    hidden_of_draft, pool = _evaluate(verifier, verifier_config, asked, batch.verified, pool)
    targets = in_chunks(target)
    accepted = real & _agreeing_prefix(drafts == targets.token, head.segment)
    return Trace(jnp.int32(1), drafts[None], accepted[None], targets.logprob[None], targets.likeliest), pool


def _evaluate(
    verifier: Params, config: ModelConfig, tokens: RowInts, rows: Verified, pool: KvArrays
) -> tuple[Hidden, KvArrays]:
    return forward_decode(verifier, config, tokens, rows.positions, pool, rows.place, rows.seen)


def _in_chunks(choose: Callable[[Cut], Drawn], total: int, size: int, count: Int[Array, ""]) -> Drawn:
    """`choose` for chunks of `size` of the head rows, of which only the first `count` are needed.

    A single chunk is no loop, so that XLA keeps the draft's logits for the mixture instead of computing them
    twice.
    """
    if size == total:
        return choose(lambda x: x)

    def body(index: Array, out: Drawn) -> Drawn:
        start = jnp.minimum(index * size, total - size)
        chosen = choose(lambda x: lax.dynamic_slice_in_dim(x, start, size))
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), out, chosen)

    of_chunk = jax.eval_shape(lambda: choose(lambda x: x[:size]))
    nothing = jax.tree.map(lambda x: jnp.zeros((total, *x.shape[1:]), x.dtype), of_chunk)
    return lax.fori_loop(0, (count + size - 1) // size, body, nothing)


def _draw(
    values: Float[Array, "part common"],
    positions: Int[Array, " part"],
    part: AdaptiveSegments,
    keys: Keys,
    of: Int[Array, " part"] | None = None,
) -> Drawn:
    """What each row takes of the values, without its bans and with its noise.

    Arguments:
    - `of`: the tokens whose log-probabilities are returned instead of the taken tokens', with the
      likeliest of all.
    """
    values = allowed(values, part.limit, part.token_bans)
    token = drawn(values, part.temperature, keys, positions)
    chosen = jnp.take_along_axis(values, (token if of is None else of)[:, None], axis=1)[:, 0]
    total = jax.nn.logsumexp(values, axis=1)
    found = None if of is None else likeliest(values, part.listed)
    if found is not None:
        found = found._replace(values=found.values - total[:, None])
    return Drawn(token, chosen - total, found)


def _agreeing_prefix(agrees: Bool[Array, " head"], segment: Int[Tensor, " head"]) -> Bool[Array, " head"]:
    """The rows of each segment before its first disagreement; a segment's first row counts as agreeing."""
    segment = jnp.asarray(segment)
    first = jnp.concatenate([jnp.ones(1, bool), segment[1:] != segment[:-1]])
    failures = jnp.cumsum(~(agrees | first))
    before = lax.cummax(jnp.where(first, failures, 0))
    return failures == before
