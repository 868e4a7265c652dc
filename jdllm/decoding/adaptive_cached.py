"""Adaptive parallel decoding with cached keys and values of the diffusion model, beside the verifier's."""

import jax.numpy as jnp

from jdllm.decoding.adaptive import AdaptiveBatch, Models, real_rows, sources_of, verify_draft
from jdllm.decoding.batch import Trace
from jdllm.execution.paged.forward import forward_refresh, forward_reuse
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.paged.selection import Selection
from jdllm.execution.transformer import Wanted
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.split_attention import PageTable


def refresh_adaptive(
    params: Params,
    verifier: Params,
    batch: AdaptiveBatch,
    selection: Selection,
    table: PageTable,
    stored: KvArrays,
    pool: KvArrays,
    *,
    config: ModelConfig,
    verifier_config: ModelConfig,
    logits_chunks: int,
) -> tuple[tuple[Trace, KvArrays], KvArrays]:
    """One iteration of whole sequences, whose keys and values are stored for the iterations to come.

    Arguments:
    - `params`, `verifier`: stacked weights of the diffusion model and of the autoregressive one.
    - `batch`: the packed batch.
    - `selection`: which rows may be stored; all of them are, and none of a segment that stores nothing.
    - `table`: the pages of each segment.
    - `stored`: keys and values of the diffusion model; given back, donate them.
    - `pool`: of the verifier; given back, donate it.
    - `config`, `verifier_config`: static.
    - `logits_chunks`: into how many chunks the head rows are cut, of one of which logits exist; static.

    Returns a trace of one step as `denoise_adaptive` does, with the verifier's pool, and last what is stored
    of the diffusion model, which several cards share out. Exact where every row sees its whole sequence: the
    step evaluates everything.
    """
    wanted = Wanted(sources_of(config, batch), real_rows(batch))
    hidden, stored = forward_refresh(
        params,
        config,
        jnp.asarray(batch.tokens),
        batch.rows,
        stored,
        selection,
        table,
        scored=False,
        usual=True,
        wanted=wanted,
    )
    models, every = Models(params, verifier, config, verifier_config), jnp.arange(len(wanted.rows))
    return verify_draft(models, batch, hidden, every, pool, chunks=logits_chunks), stored


def reuse_adaptive(
    params: Params,
    verifier: Params,
    batch: AdaptiveBatch,
    table: PageTable,
    stored: KvArrays,
    pool: KvArrays,
    *,
    config: ModelConfig,
    verifier_config: ModelConfig,
    logits_chunks: int,
) -> tuple[Trace, KvArrays]:
    """One iteration whose draft comes from the rows that are not stored.

    Arguments:
    - `params`, `verifier`: stacked weights of the diffusion model and of the autoregressive one.
    - `batch`: the packed batch, of the rows that are forwarded.
    - `table`: the pages, and the fresh rows, that each tile of rows sees.
    - `stored`: keys and values of the diffusion model, by the last refresh; read only.
    - `pool`: of the verifier; given back, donate it.
    - `config`, `verifier_config`: static.
    - `logits_chunks`: into how many chunks the head rows are cut, of one of which logits exist; static.

    Returns a trace of one step as `denoise_adaptive` does, and the verifier's pool. Approximate: the draft is
    made from keys and values as old as the last refresh. What the verifier makes of the draft is exact.
    """
    hidden = forward_reuse(params, config, jnp.asarray(batch.tokens), batch.rows, stored, table)
    models = Models(params, verifier, config, verifier_config)
    return verify_draft(models, batch, hidden, sources_of(config, batch), pool, chunks=logits_chunks)
