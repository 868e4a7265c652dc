"""Packed attention: the entry point and the merge of partial results."""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from jdllm.pallas.attention.limits import ATTENTION
from jdllm.pallas.attention.ranges import Ranges
from jdllm.pallas.attention.types import AttentionOutput, Bounds, Keys, Queries
from jdllm.pallas.device import target

Implementation = Literal["mosaic_gpu", "triton", "xla", "reference"]


def attention(
    q: Queries,
    k: Keys,
    v: Keys,
    k_start: Bounds,
    k_end: Bounds,
    *,
    scale: float,
    ranges: Ranges | None = None,
    implementation: Implementation | None = None,
    platform: str | None = None,
) -> AttentionOutput:
    """Softmax attention of packed rows, each over its own range of keys.

    Arguments:
    - `q`: rotated queries; query head h reads key-value head h // (heads / kv_heads).
    - `k`, `v`: rotated keys and values, in any row order the ranges refer to.
    - `k_start`, `k_end`: int32 range [start, end) of key rows that each query row sees. Full, causal,
      block-causal and sliding-window attention differ in these ranges only; an empty range is allowed.
    - `scale`: factor of the scores, usually head_dim ** -0.5.
    - `ranges`: `ranges_of` the bounds, for callers that have the same ones in many calls.
    - `implementation`: "mosaic_gpu" (for Hopper), "triton" (from Ampere on, by the extras cuda12 and cuda13),
      "xla" (portable) or "reference" (dense oracle); by default the first that can run and is not turned off.
    - `platform`: what will run it, "cpu" or "cuda"; by default the platform of JAX's default device.

    Returns (o, m, l) as `AttentionOutput` describes; scores and softmax are f32.

    Raises `NotImplementedError` where the given implementation cannot run, naming its limit.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {q.shape[1]} query heads are no multiple of {k.shape[1]} key-value heads"
        )

    form = ATTENTION.choose(target(platform), implementation, q, scale)
    return form(q, k, v, k_start, k_end, scale=scale, hints={"ranges": ranges})


def nothing_seen(q: Queries) -> AttentionOutput:
    """Attention over no keys, with f32 outputs: what `merge` begins with."""
    shape = q.shape[:2]
    return AttentionOutput(
        jnp.zeros(q.shape, jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    )


def merge(parts: Sequence[AttentionOutput]) -> AttentionOutput:
    """Combine attention over disjoint sets of keys into attention over their union.

    Arguments:
    - `parts`: results of the same query rows over different keys.

    Returns the result over all keys, `o` in the dtype of the first part; exact up to rounding
    (log-sum-exp merging as in flash decoding).
    """
    stacked = (jnp.stack([x.astype(jnp.float32) for x in column]) for column in zip(*parts, strict=True))
    o, m, total = merge_stacked(AttentionOutput(*stacked))
    return AttentionOutput(o.astype(parts[0].o.dtype), m, total)


def merge_stacked(parts: AttentionOutput) -> AttentionOutput:
    """`merge` of parts that lie behind one another along a first axis, with `o` in f32."""
    m = parts.m.max(axis=0)
    finite = jnp.where(jnp.isneginf(m), 0.0, m)
    weights = parts.l * jnp.exp(parts.m - finite)
    total = weights.sum(axis=0)
    o = (weights[..., None] * parts.o.astype(jnp.float32)).sum(axis=0)
    return AttentionOutput(o / jnp.where(total == 0, 1.0, total)[..., None], m, total)
