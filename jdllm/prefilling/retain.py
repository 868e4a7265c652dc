"""The fourth stage: how much the end of the query and the tokens of a chunk attend to each other."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor
from jdllm.decoding.prefilling import Prefilling
from jdllm.execution.transformer import embed, packed_ranges, scan_layers
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.cards import joined, largest, of_copies, summed
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Layer, Ranges
from jdllm.models.weights import Params
from jdllm.pallas.attention import AttentionOutput
from jdllm.prefilling.segments import Segment, ends

Ints = Int[np.ndarray, " length"]
Values = Float[Array, "layers chunks groups tokens"]


class Watched(NamedTuple):
    """Whose attention is measured, in each of several chunks.

    - `tokens`: packed rows of each chunk; those beyond its length may be any.
    - `length`: tokens of each chunk.
    - `window`: packed rows of the end of the query behind each chunk.
    """

    tokens: Int[Tensor, "chunks tokens"]
    length: Int[Tensor, " chunks"]
    window: Int[Tensor, "chunks window"]

    @property
    def rows(self) -> tuple[Int[Array, "chunks tokens"], Int[Array, "chunks window"]]:
        return jnp.asarray(self.tokens), jnp.asarray(self.window)


class WatchedRanges(NamedTuple):
    """Packed rows that see ranges of each other, and some of which are watched: a `Sees`.

    - `ranges`: the rows that each row sees.
    - `watched`: the rows whose attention is measured.
    - `prefilling`: settings; the fields `retention...` matter.
    """

    ranges: Ranges
    watched: Watched
    prefilling: Prefilling

    def attend(self, layer: Layer, h: Hidden) -> tuple[Array, Float[Array, "chunks groups tokens"]]:
        k, v, q = layer.project(h, self.ranges.rotation, ("k", "v", "q"))
        out, scale = AttentionOutput(*self.ranges.over(layer, q, k, v)), layer.config.attention_scale
        worth = _worth(q, k, out, self.ranges.rows.k_end, self.watched, self.prefilling, scale)
        return out.o, _of_all_cards(worth, self.prefilling, layer.config)


def retention_segment(prefix: Ints, chunk: Ints, window: Ints, mask: str) -> Segment:
    """Instruction, chunk, and the end of the query behind it.

    Arguments:
    - `prefix`, `chunk`, `window`: ids of each.
    - `mask`: what the rows see: "causal", "none" or "query_to_chunk" (`Prefilling.retention_mask`).
    """
    tokens = np.concatenate([prefix, chunk, window])
    return Segment.of(tokens, ends(mask, len(prefix), len(chunk), len(window)))


def retain(
    params: Params,
    tokens: RowInts,
    rows: Rows,
    watched: Watched,
    *,
    config: ModelConfig,
    prefilling: Prefilling,
) -> Values:
    """What each token of some chunks is worth in each layer: attention probabilities, pooled along the chunk.

    Only the products of the watched rows exist, never the products of all rows.

    Arguments:
    - `tokens`, `rows`: of segments that `retention_segment` makes.
    - `watched`: the rows whose attention is measured.
    - `config`, `prefilling`: static; of the settings the fields `retention...` matter.

    Returns f32 values; one group for all heads, or one for each key-value head. Tokens beyond the length of a
    chunk are not meaningful. Exact: as published. Source: Prefilling-dLLM.
    """
    sees = WatchedRanges(packed_ranges(config, rows), watched, prefilling)
    per_head = prefilling.retention == "per_head"
    groups = config.num_kv_heads * config.cards // config.kv_copies if per_head else 1
    values = jnp.zeros((config.num_layers, watched.length.size, groups, watched.tokens.shape[1]))

    def body(carry: tuple[Hidden, Values], layer: Layer) -> tuple[Hidden, Values]:
        h, found = layer.apply(carry[0], sees)
        return h, lax.dynamic_update_index_in_dim(carry[1], found, layer.number, 0)

    return scan_layers(params, config, (embed(params, jnp.asarray(tokens)), values), body)[1]


def reduced_layers(values: Float[np.ndarray, "layers *of tokens"], prefilling: Prefilling) -> np.ndarray:
    """Combine the values of several layers.

    Returns f32 `[*of, tokens]` where all layers keep the same tokens, else `[layers, *of, tokens]`: layers
    that do not count take the values of the lowest that does.
    """
    depth = prefilling.retention_depth
    layers = np.arange(len(values))
    used = layers if depth is None else layers[:depth] if depth > 0 else layers[depth:]
    if prefilling.retention == "per_head":
        return values[np.where(np.isin(layers, used), layers, used[0])]
    total = values[used].sum(axis=0)
    return total / np.float32(len(used)) if prefilling.retention_layers == "mean" else total


def _worth(
    q: Array,
    k: Array,
    out: AttentionOutput,
    k_end: RowInts,
    watched: Watched,
    prefilling: Prefilling,
    scale: float,
) -> Float[Array, "chunks groups tokens"]:
    """The values of one layer."""
    tokens, window = watched.rows
    of_rows = jnp.sum if prefilling.retention_rows == "sum" else jnp.mean
    total = jnp.zeros((tokens.shape[0], q.shape[1], tokens.shape[1]))
    if prefilling.retention_direction in ("query_to_chunk", "both"):
        seen = _probabilities(q, k, out, k_end, window, tokens, scale)
        total += of_rows(seen, axis=2)
    if prefilling.retention_direction in ("chunk_to_query", "both"):
        seen = _probabilities(q, k, out, k_end, tokens, window, scale)
        total += of_rows(seen, axis=3)
    pooled = _pooled(total, jnp.asarray(watched.length)[:, None, None], prefilling)
    by_group = pooled.reshape(pooled.shape[0], k.shape[1], -1, pooled.shape[-1])
    if prefilling.retention == "per_head":
        return by_group.mean(axis=2)
    of_heads = jnp.sum if prefilling.retention_heads == "sum" else jnp.max
    return of_heads(pooled, axis=1)[:, None]


def _of_all_cards(
    worth: Float[Array, "chunks groups tokens"], prefilling: Prefilling, config: ModelConfig
) -> Float[Array, "chunks all_groups tokens"]:
    """The values of all heads, from those of the heads of each card."""
    if prefilling.retention == "per_head":
        of_group = of_copies(worth, config.kv_copies).mean(axis=0)
        return joined(of_group, config.cards, axis=1)[:, :: config.kv_copies]
    return (summed if prefilling.retention_heads == "sum" else largest)(worth, config.cards)


def _probabilities(
    q: Array,
    k: Array,
    out: AttentionOutput,
    k_end: RowInts,
    queries: Int[Array, "chunks a"],
    keys: Int[Array, "chunks b"],
    scale: float,
) -> Float[Array, "chunks heads a b"]:
    """How much some rows of each chunk attend to some others; 0 where they do not see them."""
    group = q.shape[1] // k.shape[1]
    asked = q[queries].reshape(*queries.shape, k.shape[1], group, -1)
    scores = scale * jnp.einsum(
        "cahgd,cbhd->chgab",
        asked,
        k[keys],
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(scores.shape[0], -1, *scores.shape[3:])
    m, total = (jnp.moveaxis(x[queries], 2, 1)[..., None] for x in (out.m, out.l))
    seen = keys[:, None, None, :] < jnp.asarray(k_end)[queries][:, None, :, None]
    return jnp.where(seen, jnp.exp(scores - m) / total, 0)


def _pooled(
    values: Float[Array, "chunks heads tokens"], length: Int[Array, "chunks 1 1"], prefilling: Prefilling
) -> Float[Array, "chunks heads tokens"]:
    """The pool along each chunk. Of an even width one more token counts on the left; a mean counts zeros
    beyond the ends; a short chunk has a pool of its length at most."""
    tokens, most = values.shape[-1], prefilling.retention_pool // 2
    combine, nothing = (jnp.add, 0.0) if prefilling.retention_pooling == "mean" else (jnp.maximum, -jnp.inf)
    values = jnp.where(jnp.arange(tokens) < length, values, nothing)
    padded = jnp.pad(values, ((0, 0), (0, 0), (most, most)), constant_values=nothing)
    width = jnp.minimum(prefilling.retention_pool, length)
    neighbours = [
        jnp.where(
            (-(width // 2) <= at) & (at < width - width // 2), padded[..., most + at :][..., :tokens], nothing
        )
        for at in range(-most, most + 1)
    ]
    total = functools.reduce(combine, neighbours)
    return total / width if prefilling.retention_pooling == "mean" else total
