"""The denoising step, and the device loop over the steps of a dispatch."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jdllm.decoding.batch import Batch, HeadRows, Trace
from jdllm.decoding.head import Choice, choose
from jdllm.decoding.transfer import select_top
from jdllm.models.config import ModelConfig
from jdllm.models.transformer import forward
from jdllm.models.weights import Params
from jdllm.planning.chunks import ChunkConfig


def denoise(
    params: Params,
    batch: Batch,
    max_steps: Int[Array, ""],
    *,
    config: ModelConfig,
    mask_id: int,
    chunks: ChunkConfig,
    capacity: int,
) -> Trace:
    """Run up to `max_steps` denoising steps; stop as soon as any segment has finished its block.

    Arguments:
    - `params`: stacked weights.
    - `batch`: the packed batch. `batch.head` lists the rows of every segment up to the end of its current
      block that are masked now, in rising order of position; later rows cannot commit and are not evaluated.
    - `max_steps`: int32, at most `capacity`. Tokens do not depend on it.
    - `config`, `mask_id`, `chunks`: static.
    - `capacity`: static length of the trace.

    Returns the trace. Exact: the steps are those of the official LLaDA sampler.
    """
    head, segments = batch.head, batch.segments
    positions = batch.rows.positions[head.row]
    size = segments.quota.shape[0]

    def masked_rows(tokens: Array) -> Bool[Array, " head"]:
        return (tokens[head.row] == mask_id) & (head.segment < size)

    def unfinished(carry: tuple[Array, Trace]) -> Bool[Array, ""]:
        tokens, trace = carry
        left = jnp.zeros(size + 1, bool).at[head.segment].max(masked_rows(tokens))[:size]
        in_block = segments.block_step + trace.steps < segments.block_steps
        active = segments.block_steps > 0
        return (trace.steps < max_steps) & jnp.all((left & in_block) | ~active)

    def step(carry: tuple[Array, Trace]) -> tuple[Array, Trace]:
        tokens, trace = carry
        index = trace.steps
        hidden = forward(params, config, tokens, batch.rows, chunks=chunks)
        masked = masked_rows(tokens)
        choice = _choose_masked(params, config, hidden, batch, positions, masked, index, chunks.logits)
        quota = segments.quota + (segments.block_step + index < segments.remainder)
        commit = select_top(choice.confidence, masked, head.segment, quota)
        tokens = _commit(tokens, head, commit, choice.token)
        return tokens, Trace(
            index + 1, trace.tokens.at[index].set(choice.token), trace.committed.at[index].set(commit)
        )

    rows = head.row.shape[0]
    empty = Trace(jnp.int32(0), jnp.zeros((capacity, rows), jnp.int32), jnp.zeros((capacity, rows), bool))
    return lax.while_loop(unfinished, step, (jnp.asarray(batch.tokens), empty))[1]


def _choose_masked(
    params: Params,
    config: ModelConfig,
    hidden: Array,
    batch: Batch,
    positions: Array,
    masked: Bool[Array, " head"],
    index: Array,
    chunks: int,
) -> Choice:
    """Evaluate the masked head rows only: they are moved to the front, evaluated, and moved back."""
    front = jnp.argsort(~masked, stable=True)
    head, at = jax.tree.map(lambda x: x[front], (batch.head, positions))
    segments = batch.segments
    choice = choose(params, config, hidden, head, at, segments, segments.step + index, masked.sum(), chunks)
    return jax.tree.map(lambda x: jnp.zeros_like(x).at[front].set(x), choice)


def _commit(
    tokens: Int[Array, " rows"], head: HeadRows, commit: Bool[Array, " head"], choice: Int[Array, " head"]
) -> Int[Array, " rows"]:
    """Write the committed tokens into the rows and into their unguided copies."""
    nowhere = tokens.shape[0]
    for rows in (head.row, head.unguided):
        tokens = tokens.at[jnp.where(commit, rows, nowhere)].set(choice, mode="drop")
    return tokens
