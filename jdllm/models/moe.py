"""The feed-forward layer of a mixture of experts: routing, grouping by expert, and the weighted sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from jdllm.models.config import MoeConfig
from jdllm.models.leaf import logits
from jdllm.quantised import Quantised

GroupedMatmulFn = Callable[..., Array]

_NO_ZERO = 1e-20
"""Added to the sum of a row's weights, as the published code does."""


class Experts(NamedTuple):
    """Weights of the experts of all layers of a stack, and the place where the experts of one layer begin.

    The stack is never sliced by layer: an operator that is no XLA product would be given a copy.

    - `gate`, `up`: `[layers x experts, hidden, ffn]`; `down`: `[layers x experts, ffn, hidden]`. Matrices in
      few bits have their last two sides the other way round.
    - `first`: index of the layer's first expert.
    - `per_layer`: experts in a layer.
    """

    gate: Float[Array, "all_experts hidden ffn"] | Quantised
    up: Float[Array, "all_experts hidden ffn"] | Quantised
    down: Float[Array, "all_experts ffn hidden"] | Quantised
    first: Int[Array, ""] | int
    per_layer: int

    def of_layer(self, place: Int[Array, ""] | int) -> "Experts":
        """The experts of the layer at `place` in the stack."""
        return self._replace(first=place * self.per_layer)


def experts_of(stack: dict[str, Any]) -> Experts | None:
    """Take the experts out of a stack of layers; `None` where it has none."""
    if "experts_gate" not in stack:
        return None
    leaves = [stack.pop(f"experts_{name}") for name in ("gate", "up", "down")]
    gate, up, down = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), leaves)
    return Experts(gate, up, down, 0, leaves[0].shape[1])


def route(
    x: Float[Array, "rows hidden"],
    router: Float[Array, "experts hidden"],
    bias: Float[Array, " experts"] | None,
    moe: MoeConfig,
) -> tuple[Float32[Array, "rows top_k"], Int32[Array, "rows top_k"]]:
    """Choose each row's experts.

    Arguments:
    - `x`: normed rows.
    - `router`, `bias`: weights of the router, and the bias on its scores.
    - `moe`: how scores are made, how they choose, and how they become weights.

    Returns weights and experts, by falling score (of equal ones the lower expert first). Everything is f32.
    Unless normalised, weights do not add up to one (quirk Q35). Sources: LLaDAMoESparseMoeBlock of
    modeling_lladamoe.py, the gate of modeling_llada2_moe.py and Qwen3MoeSparseMoeBlock of transformers.
    """
    row_logits = logits(x, router)
    scores = jax.nn.sigmoid(row_logits) if moe.score == "sigmoid" else jax.nn.softmax(row_logits, axis=-1)
    biased = scores if bias is None else scores + bias.astype(jnp.float32)
    weights, experts = lax.top_k(_in_kept_groups(biased, moe), moe.top_k)
    if not moe.bias_weighs:
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.normalized:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _NO_ZERO)
    return weights * moe.scale, experts


def _in_kept_groups(scores: Float32[Array, "rows experts"], moe: MoeConfig) -> Float32[Array, "rows experts"]:
    """The scores of experts in a row's best groups (of equal ones the lower), -inf for all others."""
    if moe.kept_groups == moe.groups:
        return scores
    by_group = scores.reshape(len(scores), moe.groups, -1)
    best_two, _ = lax.top_k(by_group, 2)
    _, kept = lax.top_k(best_two.sum(axis=-1), moe.kept_groups)
    is_kept = (kept[:, :, None] == jnp.arange(moe.groups)).any(axis=1)
    return jnp.where(is_kept[:, :, None], by_group, -jnp.inf).reshape(scores.shape)


def moe_ffn(
    x: Float[Array, "rows hidden"],
    router: Float[Array, "experts hidden"],
    bias: Float[Array, " experts"] | None,
    experts: Experts,
    moe: MoeConfig,
    grouped_matmul: GroupedMatmulFn,
) -> Float[Array, "rows hidden"]:
    """The weighted sum of the experts that each row chooses, every one a gated feed-forward layer.

    Rows are sorted by expert, so that each product reads an expert's weights once. Weights are cast to the
    dtype of `x` as in the published model; the sum is f32.

    Arguments:
    - `x`: normed rows.
    - `router`, `bias`: weights of the router, and the bias on its scores.
    - `experts`: of this layer.
    - `moe`: how rows choose.
    - `grouped_matmul`: with the contract of `jdllm.pallas.grouped_matmul.grouped_matmul`, `gate` included.
    """
    (rows, hidden), top_k = x.shape, moe.top_k
    weights, chosen = route(x, router, bias, moe)
    chosen = chosen.reshape(-1)
    order = jnp.argsort(chosen)
    # Into an array of which nothing stays: a new one would be copied in every turn of a loop over layers.
    place = chosen.at[order].set(jnp.arange(rows * top_k), unique_indices=True)
    sizes = (chosen[:, None] == jnp.arange(router.shape[0])).sum(axis=0, dtype=jnp.int32)

    by_expert = x[lax.div(order, jnp.int32(top_k))]
    inner = grouped_matmul(by_expert, experts.up, sizes, first_group=experts.first, gate=experts.gate)
    y = grouped_matmul(inner, experts.down, sizes, first_group=experts.first)
    y = y[place].reshape(rows, top_k, hidden)
    weighted = y * weights.astype(x.dtype)[:, :, None]
    return weighted.sum(axis=1, dtype=jnp.float32).astype(x.dtype)
