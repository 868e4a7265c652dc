"""Log-probabilities of given tokens, and the masks of a stratified Monte Carlo likelihood."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.chunks import ChunkConfig
from jdllm.decoding.head import Sources, gather_guided
from jdllm.execution.transformer import apply_layers, embed, forward, logits
from jdllm.execution.two_ranges import FurtherKeys, seeing_both
from jdllm.models import leaf
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, head_weights
from jdllm.pallas.masked_logits import Likeliest
from jdllm.pallas.masked_logits.xla import likeliest


class Perturbation(NamedTuple):
    """Partly masked copies of an answer.

    - `masked`: bool `[iterations, batch, answer]`, the positions that are masked.
    - `ratio`: float `[iterations, batch]`, the share of each row that is masked.
    """

    masked: np.ndarray
    ratio: np.ndarray


def perturb(answer_length: int, mc_num: int, batch_size: int, seed: int | Sequence[int]) -> Perturbation:
    """Draw the masks of the Monte Carlo estimate.

    Each iteration draws one number of masks and spreads the rows of its batch evenly over all numbers from
    there, so that the batch is stratified. Source: get_log_likelihood.py of ML-GSAI/LLaDA.

    Arguments:
    - `answer_length`: positions of the answer, at least 1.
    - `mc_num`: rows in all, rounded down to whole batches of `batch_size`.
    - `seed`: one number, or several; the same seed gives the same masks.
    """
    rng = np.random.default_rng(seed)
    iterations = max(mc_num // batch_size, 1)
    first = rng.integers(1, answer_length + 1, (iterations, 1))
    offsets = np.linspace(0, (batch_size - 1) * answer_length / batch_size, batch_size)
    counts = (np.round(first + offsets).astype(int) - 1) % answer_length + 1
    ranks = rng.permuted(np.broadcast_to(np.arange(answer_length), (*counts.shape, answer_length)), axis=-1)
    return Perturbation(ranks < counts[..., None], counts / answer_length)


class TokenScores(NamedTuple):
    """What a model says of given tokens, each at its head row.

    - `logprob`: f32, the log-probability of the token.
    - `best`, `best_logprob`: the likeliest id there, of equals the lowest, and its log-probability.
    - `likeliest`: ids and log-probabilities of the likeliest ones, `None` where they are not wanted.
    """

    logprob: Float[Tensor, " head"]
    best: Int[Tensor, " head"]
    best_logprob: Float[Tensor, " head"]
    likeliest: Likeliest | None


class Asked(NamedTuple):
    """Packed rows, and the tokens that are asked for.

    - `tokens`, `rows`: int32 ids, and positions and key ranges, of all rows.
    - `further`: keys that rows see beside those of their ranges; `None` where no row sees any.
    - `sources`: the rows that predict the tokens.
    - `targets`: the ids of the tokens, int32.
    """

    tokens: Int[Tensor, " rows"]
    rows: Rows
    further: FurtherKeys | None
    sources: Sources
    targets: Int[Tensor, " head"]


def token_logprobs(
    params: Params,
    asked: Asked,
    guidance: Float[Array, " head"],
    listed: Bool[Array, " head"],
    *,
    config: ModelConfig,
    chunks: ChunkConfig,
) -> TokenScores:
    """Scores of the tokens that are asked for after one forward evaluation, with the likeliest ids of
    `listed` ones.

    Logits exist for one of `chunks.logits` chunks of these tokens at a time.
    """
    attention = None if asked.further is None else seeing_both(asked.rows, asked.further)
    embedded = embed(params, asked.tokens)
    hidden = apply_layers(params, config, embedded, asked.rows, chunks=chunks, attention=attention)
    total = asked.targets.shape[0]
    size = -(-total // chunks.logits)

    def evaluate(index: Array, out: TokenScores) -> TokenScores:
        start = jnp.minimum(index * size, total - size)
        sources, scale, target, wanted = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, size),
            (asked.sources, guidance, asked.targets, listed),
        )
        h = gather_guided(params, config, hidden, sources, scale)
        found = _scores(leaf.logits(h, head_weights(params)), target, wanted)
        return jax.tree.map(lambda all, new: lax.dynamic_update_slice_in_dim(all, new, start, 0), out, found)

    nothing = jnp.zeros(total), jnp.zeros(total, jnp.int32), jnp.zeros(total)
    empty = TokenScores(*nothing, Likeliest.nothing(total))
    return lax.fori_loop(0, chunks.logits, evaluate, empty)


def _scores(
    row_logits: Float[Array, "rows vocab"], target: Int[Array, " rows"], listed: Bool[Array, " rows"]
) -> TokenScores:
    total = jax.nn.logsumexp(row_logits, axis=-1)
    best = jnp.argmax(row_logits, axis=-1)
    chosen, highest = (
        jnp.take_along_axis(row_logits, ids[:, None], axis=-1)[:, 0] - total for ids in (target, best)
    )
    found = likeliest(row_logits, listed)
    found = found._replace(values=found.values - total[:, None])
    return TokenScores(chosen, best.astype(jnp.int32), highest, found)


def all_logits(
    params: Params,
    tokens: Int[Array, " rows"],
    rows: Rows,
    *,
    config: ModelConfig,
    chunks: ChunkConfig,
) -> Float[Array, "rows vocab"]:
    """f32 logits of every row, before any shift. For checking: they are as large as they look."""
    return logits(params, config, forward(params, config, tokens, rows, chunks=chunks))
