"""The third stage: every chunk is scored by how likely it makes the query and the draft."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.execution.paged.parts import PackedParts, forward_parts
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.transformer import logits
from jdllm.models.block import Hidden
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.prefilling.segments import Segment, ends

Ints = Int[np.ndarray, " length"]


class Behind(NamedTuple):
    """The rows behind each chunk: the query, and the draft with its masks.

    - `tokens`: int32 of both.
    - `scored`: which of them are scored.
    """

    tokens: Ints
    scored: Bool[np.ndarray, " length"]


class Scoring(NamedTuple):
    """The rows that score one chunk.

    - `segment`: instruction, chunk and the rows behind it; rows that stand in for a scored token come last.
    - `own`: rows that see their own key beside their range.
    - `sources`, `targets`: the row that predicts each scored token, and the token.
    """

    segment: Segment
    own: Bool[np.ndarray, " rows"]
    sources: Ints
    targets: Ints

    def after(self, stored: int) -> "Scoring":
        """The same without its first rows, which are stored: the other rows see all of them."""
        parts = Segment(*(x[stored:] for x in self.segment))
        parts = parts._replace(
            k_start=np.zeros(parts.size, np.int32), k_end=np.maximum(parts.k_end - stored, 0)
        )
        return Scoring(parts, self.own[stored:], self.sources - stored, self.targets)


def behind(
    query: Ints, draft: Ints, mask_id: int, *, window: int | None = None, unfilled: bool = False
) -> Behind:
    """The tokens that are scored behind every chunk.

    Arguments:
    - `draft`: its slots; those that are masks are not scored, unless `unfilled`.
    - `window`: score only the last so many tokens of the query.
    """
    asked = np.arange(len(query)) >= len(query) - (window or len(query))
    return Behind(
        np.concatenate([query, draft]).astype(np.int32),
        np.concatenate([asked, (draft != mask_id) | unfilled]),
    )


def scoring_of(
    prefix: Ints, chunk: Ints, after: Behind, mask: str, mask_id: int, *, shifted: bool
) -> Scoring:
    """The rows that score a chunk.

    With shifted logits each token is predicted by the row before it. Otherwise by a mask in its own place:
    where no row sees later rows, such a mask can be a row of its own, which sees the rows before it and
    itself (leave-one-out, each token by itself).

    Arguments:
    - `mask`: what the rows see: "causal", "full", "none" or "query_to_chunk" (`Prefilling.score_mask`).
      Without a shift "causal" or "full".
    """
    tokens = np.concatenate([prefix, chunk, after.tokens]).astype(np.int32)
    before = len(prefix) + len(chunk)
    segment = Segment.of(tokens, ends(mask, len(prefix), len(chunk), len(after.tokens)))
    places = before + np.flatnonzero(after.scored)
    if shifted:
        return Scoring(segment, np.zeros(len(tokens), bool), places - 1, tokens[places])
    masks = Segment.of(np.full(len(places), mask_id), places, positions=places)
    both = Segment(*(np.concatenate(column) for column in zip(segment, masks, strict=True)))
    own = np.arange(both.size) >= len(tokens)
    return Scoring(both, own, np.flatnonzero(own), tokens[places])


def score(
    params: Params,
    parts: PackedParts,
    targets: Int[Tensor, " wanted"],
    pool: KvArrays | None,
    *,
    config: ModelConfig,
    logits_chunks: int,
) -> tuple[Float[Array, " wanted"], KvArrays | None]:
    """Log-probabilities of tokens behind the chunks of a batch.

    Arguments:
    - `parts`: the rows; `wanted` are the rows that predict the tokens.
    - `targets`: these tokens.
    - `pool`: chunks that are stored, or to be stored.
    - `config`, `logits_chunks`: static; f32 logits exist for one of so many chunks of the wanted rows.

    Returns f32 log-probabilities, not meaningful where a row is not live, and the pool where it was written.
    """
    hidden, pool = forward_parts(params, config, parts, pool)
    logprobs = target_logprobs(params, config, hidden, jnp.asarray(targets), logits_chunks)
    return logprobs, None if parts.storage is None else pool


def target_logprobs(
    params: Params, config: ModelConfig, hidden: Hidden, targets: Int[Array, " rows"], chunks: int
) -> Float[Array, " rows"]:
    """f32 log-probability of one token for each row, whose logits exist for a chunk of the rows at a time."""
    total = targets.shape[0]
    size = -(-total // chunks)

    def evaluate(index: Array, out: Float[Array, " rows"]) -> Float[Array, " rows"]:
        start = jnp.minimum(index * size, total - size)
        h, target = (lax.dynamic_slice_in_dim(x, start, size) for x in (hidden, targets))
        found = logits(params, config, h)
        chosen = jnp.take_along_axis(found, target[:, None], axis=-1)[:, 0]
        return lax.dynamic_update_slice_in_dim(out, chosen - jax.nn.logsumexp(found, axis=-1), start, 0)

    return lax.fori_loop(0, chunks, evaluate, jnp.zeros(total))
