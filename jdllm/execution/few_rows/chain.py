"""All layers of a few rows as one chain of kernels, none of them XLA's (`jdllm.pallas.chain`).

What such a step takes is the time to read the weights, and what passes between two kernels while nothing is
read. In a chain the next kernel reads its weights meanwhile. Layers are not a loop, so that nothing stands
between them either.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.layers import rms_norm
from jdllm.models.block import Hidden
from jdllm.models.cards import ADDRESSES
from jdllm.models.config import ModelConfig
from jdllm.models.rotary import Rotation
from jdllm.models.weights import Params, layer_runs
from jdllm.pallas.add_norm import add_norm, check_add_norm
from jdllm.pallas.device import target
from jdllm.pallas.dispatch import limit
from jdllm.pallas.head_norm import check_head_norm, head_norm
from jdllm.pallas.skinny_matmul import skinny_matmul, skinny_parts
from jdllm.pallas.skinny_matmul.limits import SKINNY_MATMUL

_QKV, _GATES = ("q", "k", "v"), ("gate", "up")
_WEIGHTS = {"attn_norm", "ffn_norm", "o", "down", *_QKV, *_GATES}
_BIASES = tuple(f"{name}_bias" for name in _QKV)
_NORMS = ("q_norm", "k_norm")


class ChainedAttention(Protocol):
    """Attention of rotated queries over cached and fresh keys and values.

    Returns the outputs of all rows in their order, in any shape.
    """

    def __call__(self, q: Array, k: Array, v: Array, *, layer: Array, chained: bool) -> Array: ...


class ChainOperands(NamedTuple):
    """What the kernels of a chain take besides rows and weights; a loop of steps makes it once, before it.

    - `numbers`: each layer's place in its stack.
    - `bias`: of queries, keys and values together, where the model has one.
    """

    numbers: tuple[Int[Array, ""], ...]
    bias: Array | None


def chains(params: Params, config: ModelConfig, rows: int) -> bool:
    """Whether `run_chain` can take so many rows of this model, on the device at hand.

    It cannot take layers in host memory, experts, heads that are rotated in part, queries that are scaled by
    position, keys and values that are stored in 8 bits beside rows of any type but bfloat16, nor parts of a
    model on cards that cannot exchange.

    Arguments:
    - `params`, `config`: of one card's part, where a step runs on several.
    """
    if (config.cards > 1 and ADDRESSES not in params) or config.rope.query_beta:
        return False
    if config.offloaded:
        return False
    ((name, _, _), *more) = layer_runs(config)
    stack = params[name]
    if more or set(stack) not in (_WEIGHTS, _WEIGHTS | set(_BIASES), _WEIGHTS | set(_NORMS)):
        return False
    if config.rope.rotated_dim(config.head_dim) < config.head_dim:
        return False
    exchanged, dtype = rows if config.cards > 1 else 0, stack["attn_norm"].dtype
    if config.kv_cache_dtype != "auto" and dtype != jnp.bfloat16:
        return False
    if limit(check_add_norm, dtype, config.hidden_size, exchanged) is not None:
        return False
    heads, normed = (config.num_heads, config.num_kv_heads), "q_norm" in stack
    if normed and limit(check_head_norm, dtype, heads, config.head_dim) is not None:
        return False

    def streamed(*names: str, head_dim: int | None = None) -> bool:
        weights = [stack[name] for name in names]
        x = jax.ShapeDtypeStruct((rows, weights[0].shape[2]), dtype)
        return "chained" in SKINNY_MATMUL.default(target(), x, weights, head_dim).hints

    projected = streamed(*_QKV, head_dim=None if normed else config.head_dim)
    return projected and all(streamed(*names) for names in (_GATES, ("o",), ("down",)))


def chains_storing(params: Params, config: ModelConfig, rows: int) -> bool:
    """The same of a step that stores rows.

    Rows that are stored in 8 bits see themselves rounded: that would be a kernel of XLA's in each layer.
    """
    return config.kv_cache_dtype == "auto" and chains(params, config, rows)


def chain_operands(params: Params, config: ModelConfig) -> ChainOperands:
    """The operands of the chain of a model for which `chains` holds.

    XLA writes constants beside the code of its kernels, where the driver may put them at addresses that
    kernels of Mosaic refuse: numbers of layers follow from a weight, of which XLA does not know that it does
    not matter.
    """
    ((name, begin, end),) = layer_runs(config)
    stack = params[name]
    bits = lax.bitcast_convert_type(stack["attn_norm"][0, 0], jnp.uint16)
    zero = jnp.minimum(bits.astype(jnp.int32), 0)
    biases = [stack[name] for name in _BIASES if name in stack]
    return ChainOperands(
        tuple(zero + place for place in range(begin, end)),
        jnp.concatenate(biases, axis=1) if biases else None,
    )


def run_chain(
    params: Params,
    config: ModelConfig,
    operands: ChainOperands,
    h: Hidden,
    rotation: Rotation,
    attention: ChainedAttention,
) -> tuple[Hidden, list[tuple[Array, Array]]]:
    """Run all layers of a model for which `chains` holds.

    Arguments:
    - `operands`: the weights of the chain, which `chain_operands` makes once.
    - `h`: embedded rows.
    - `rotation`: of the rows.
    - `attention`: over everything that each row sees.

    Returns the hidden rows after the last layer, as `jdllm.execution.transformer.scan_layers` would, but for
    the order of sums, and the rotated keys and the values of each layer.
    """
    ((name, begin, _),) = layer_runs(config)
    stack, (numbers, bias) = params[name], operands
    normed, addresses = "q_norm" in stack, params.get(ADDRESSES)

    @functools.partial(jax.jit, static_argnames="chained")
    def layer(
        h: Hidden, x: Hidden, place: Array, after: Array, *, chained: bool
    ) -> tuple[Hidden, Hidden, tuple[Array, Array]]:
        def products(x: Hidden, names: tuple[str, ...], **options: Any) -> tuple[Array, ...]:
            weights = [stack[name] for name in names]
            return skinny_matmul(x, weights, layer=place, chained=chained, **options)

        def add(h: Hidden, y: Hidden, weight: str, norm: str, of_layer: Array) -> tuple[Hidden, Hidden]:
            parts = skinny_parts(y, stack[weight], layer=place, chained=chained)
            options: Any = {"eps": config.rms_norm_eps, "chained": chained, "addresses": addresses}
            return add_norm(h, parts, stack[norm], of_layer, **options)

        angles = rotation.cos, rotation.sin
        qkv = products(x, _QKV, bias=bias, rotation=None if normed else angles)
        q, k, v = (y.reshape(y.shape[0], -1, config.head_dim) for y in qkv)
        if normed:
            norms, eps = (stack["q_norm"], stack["k_norm"]), config.rms_norm_eps
            q, k = head_norm(q, k, norms, place, angles, eps=eps, chained=chained)
        o = attention(q, k, v, layer=place, chained=chained)
        h, x = add(h, o.reshape(h.shape[0], -1), "o", "ffn_norm", place)
        (y,) = products(x, _GATES, gated=True)
        return *add(h, y, "down", "attn_norm", after), (k, v)

    stored: list[tuple[Array, Array]] = []
    # Else angles could be computed when they are first needed, behind the first kernel.
    h, rotation = lax.optimization_barrier((h, rotation))
    x = rms_norm(h, stack["attn_norm"][begin], config.rms_norm_eps)
    for index, (number, after) in enumerate(zip(numbers, (*numbers[1:], numbers[-1]), strict=True)):
        # What all layers read is older than the chain: the first one has waited for it.
        h, x, keys_values = layer(h, x, number, after, chained=index > 0)
        stored.append(keys_values)
    return h, stored
