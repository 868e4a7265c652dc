"""Operators of the Flax modules: attention and products of experts that have a gradient.

The kernels of `jdllm.pallas` have none. These forms hold whole batches: `[batch, length]` tokens, padded.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from jdllm.arrays import Tensor
from jdllm.models.config import ModelConfig
from jdllm.models.rotary import Rotation, rotation_at
from jdllm.models.visibility import seen_range


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sees:
    """What the tokens of a padded batch see of each other, and where they stand.

    - `shape`: (sequences, tokens of each).
    - `rotation`: of all tokens.
    - `mask`: `[batch, 1, queries, keys]`, true where a query sees a key; its first and third axis may be 1.
      `None`: every token sees every token.
    """

    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    rotation: Rotation
    mask: Bool[Array, "batch 1 queries keys"] | None

    def attend(
        self,
        q: Float[Array, "rows heads head_dim"],
        k: Float[Array, "rows kv_heads head_dim"],
        v: Float[Array, "rows kv_heads head_dim"],
        scale: float,
    ) -> Float[Array, "rows heads head_dim"]:
        """Attention of all tokens, whose rows lie one sequence after another. It has a gradient."""
        queries, keys, values = (x.reshape(*self.shape, *x.shape[1:]) for x in (q, k, v))
        return _attend(queries, keys, values, self.mask, scale).reshape(q.shape)


def sees(
    config: ModelConfig,
    shape: tuple[int, int],
    padding_mask: Bool[Tensor, "batch length"] | None = None,
    positions: Int[Tensor, "batch length"] | None = None,
) -> Sees:
    """What the tokens of a batch see under the attention of a model.

    Arguments:
    - `config`: the model; static.
    - `shape`: (sequences, tokens of each).
    - `padding_mask`: false for tokens that are not there; no token sees them, and default positions do not
      count them. They may be anywhere.
    - `positions`: for the rotary embedding; by default the place of each token in its sequence.
    """
    order = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if padding_mask is not None:
        padding_mask = jnp.asarray(padding_mask, bool)
        order = jnp.maximum(jnp.cumsum(padding_mask, axis=1) - 1, 0)
    positions = order if positions is None else jnp.broadcast_to(jnp.asarray(positions), shape)
    mask = None if padding_mask is None else padding_mask[:, None, None, :]
    seen = _seen(config, order)
    if seen is not None:
        mask = seen if mask is None else seen & mask
    return Sees(shape, rotation_at(config.rope, config.head_dim, positions.reshape(-1)), mask)


def _seen(
    config: ModelConfig, order: Int[Array, "batch length"]
) -> Bool[Array, "batch 1 queries keys"] | None:
    """Which tokens each token sees, by their places in a sequence; `None` for all of them."""
    query, key = order[:, None, :, None], order[:, None, None, :]
    found = seen_range(config, query, order.shape[1])
    return None if found is None else (found[0] <= key) & (key < found[1])


def grouped_matmul(
    x: Float[Array, "rows k"],
    weights: Float[Array, "groups k n"],
    group_sizes: Int[Array, " groups"],
    *,
    first_group: int = 0,
    gate: Float[Array, "groups k n"] | None = None,
) -> Float[Array, "rows n"]:
    """Multiply each row with the matrix of its group, as `jdllm.pallas.grouped_matmul.grouped_matmul` does.

    Arguments:
    - `x`: rows sorted by group.
    - `weights`: a matrix for each group.
    - `group_sizes`: rows in each group.
    - `first_group`: 0, as `weights` has no other groups.
    - `gate`: a second matrix for each group: the result is then silu(x gate) * (x weights).
    """

    def product(matrices: Array) -> Array:
        y = lax.ragged_dot(
            x, matrices, group_sizes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return y.astype(x.dtype)

    return product(weights) if gate is None else jax.nn.silu(product(gate)) * product(weights)


def _attend(
    q: Float[Array, "batch queries heads d"],
    k: Float[Array, "batch keys kv_heads d"],
    v: Float[Array, "batch keys kv_heads d"],
    mask: Bool[Array, "batch 1 queries keys"] | None,
    scale: float,
) -> Float[Array, "batch queries heads d"]:
    """Scores of all queries with all keys at once, in f32."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = scale * _dot("bqhgd,bkhd->bhgqk", grouped, k)
    if mask is not None:
        # A finite number: a token of padding may see nothing, and its gradient must be a number all the same.
        scores = jnp.where(mask[:, :, None], scores, np.finfo(np.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return _dot("bhgqk,bkhd->bqhgd", probabilities, v).astype(q.dtype).reshape(q.shape)


def _dot(spec: str, a: Array, b: Array) -> Float32[Array, "..."]:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
