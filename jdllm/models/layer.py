"""The one layer of the transformer: norms, projections, rotation, attention, residuals and feed-forward.

Every way to run layers takes them from here, whole or in parts: over packed rows, over pages, in chunks, with
host memory. Only the kernels of `jdllm.execution.few_rows.chain` have this order built in. What the rows of a
layer see is an object of its own, a `Sees`.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.layers import rms_norm, rotate
from jdllm.models.adapter import DOWN, UP
from jdllm.models.block import Hidden, Rows
from jdllm.models.cards import ADDRESSES, joined_rows, summed
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import matmul, some_outputs
from jdllm.models.moe import GroupedMatmulFn, moe_ffn
from jdllm.models.rotary import Rotation
from jdllm.pallas.grouped_matmul import grouped_matmul

Heads = Float[Array, "rows heads head_dim"]
KeysValues = tuple[Heads, Heads]
LayerNumber = Int[Array, ""] | int
AttentionFn = Callable[..., tuple[Array, Array, Array]]
"""Attention with the contract of `jdllm.pallas.attention.attention`."""
Weights = Mapping[str, Any]
"""The weights of one layer by name, with `experts` and `streamed` where these stay in their stacks."""


class Sees[Kept](Protocol):
    """What the rows of a layer see: ranges of packed rows, pages of a pool, keys of a sequence."""

    def attend(self, layer: "Layer", h: Hidden) -> tuple[Array, Kept]:
        """Attention of the rows `h`, whose queries, keys and values `layer.project` makes.

        Returns the outputs, `[..., heads, head_dim]` in the order of the rows, and what the rows leave
        behind: the pool where they are stored, `None` where nothing is kept.
        """
        ...


def turned(name: str, y: Heads, rotation: Rotation) -> Heads:
    """A projection "q" or "k" as attention takes it: rotated, and queries scaled. A "v" stays as it is."""
    if name == "v":
        return y
    y = rotate(y, rotation.cos, rotation.sin)
    if name == "k" or rotation.query_scale is None:
        return y
    return y * rotation.query_scale[:, None, None].astype(y.dtype)


class Group(NamedTuple):
    """One of `count` equal groups of heads; `index` may be known on the device only."""

    index: Int[Array, ""] | int
    count: int


ALL_HEADS = Group(0, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a model.

    - `weights`: of the layer; on cards that can exchange also their `ADDRESSES`.
    - `number`: of the layer in the model, for keys and values that are stored by layer.
    """

    weights: Weights
    config: ModelConfig
    number: LayerNumber = 0

    def apply[Kept](self, h: Hidden, sees: Sees[Kept]) -> tuple[Hidden, Kept]:
        """The rows after the layer, and what `sees` leaves behind."""
        o, kept = sees.attend(self, h)
        return self.finish(h, o), kept

    def finish(self, h: Hidden, o: Array) -> Hidden:
        """The rows after the layer, from the rows before the layer and their attention outputs."""
        h = h + self.project_back(o.reshape(h.shape[0], -1).astype(h.dtype))
        return h + self.feed_forward(h)

    def matrix_inputs(self, h: Hidden, sees: Sees[Any]) -> dict[str, Float[Array, "rows inputs"]]:
        """The rows that each matrix multiplies in a layer without experts, by the name of the matrix.

        Arguments:
        - `h`: the rows before the layer.
        - `sees`: what the rows see.
        """
        eps = self.config.rms_norm_eps
        attended = sees.attend(self, h)[0].reshape(h.shape[0], -1).astype(h.dtype)
        into_attention = rms_norm(h, self.weights["attn_norm"], eps)
        into_ffn = rms_norm(h + self.project_back(attended), self.weights["ffn_norm"], eps)
        found = dict.fromkeys(("q", "k", "v"), into_attention) | dict.fromkeys(("gate", "up"), into_ffn)
        return found | {"o": attended, "down": self._gated_inner(into_ffn)}

    def project(
        self, h: Hidden, rotation: Rotation, names: tuple[str, ...], group: Group = ALL_HEADS
    ) -> tuple[Heads, ...]:
        """Projections "q" and "k", which are rotated, and "v" of the rows `h`, in the order of `names`."""
        heads = zip(names, self.project_unrotated(h, names, group), strict=True)
        return tuple(turned(name, y, rotation) for name, y in heads)

    def project_unrotated(
        self, h: Hidden, names: tuple[str, ...], group: Group = ALL_HEADS
    ) -> tuple[Heads, ...]:
        """`project`, before anything is rotated."""
        x = rms_norm(h, self.weights["attn_norm"], self.config.rms_norm_eps)
        if names[0] in self._streamed:
            products = zip(names, self.weights["streamed"].products(x, names), strict=True)
            return tuple(
                self._by_heads(name, y + self.weights.get(f"{name}_bias", 0)) for name, y in products
            )
        return tuple(self._project_group(x, name, group) for name in names)

    def project_back(self, o: Float[Array, "... heads head_dim"]) -> Hidden:
        """The output projection of attention, with what an adapter adds; the residual is not added."""
        inputs = o.reshape(-1, self.config.num_heads * self.config.head_dim)
        back = matmul(inputs, self.weights["o"])
        if DOWN in self.weights:
            back += matmul(matmul(inputs, self.weights[DOWN]), self.weights[UP])
        return self._summed(back)

    def feed_forward(self, h: Hidden, products: GroupedMatmulFn = grouped_matmul) -> Hidden:
        """Feed-forward of the rows `h`, dense or by experts; the residual is not added.

        Arguments:
        - `products`: of rows with their experts; the default has no gradient.
        """
        return self._summed(self._feed_forward(h, products))

    def _summed(self, part: Hidden) -> Hidden:
        """What all cards add."""
        return summed(part, self.config.cards, self.weights.get(ADDRESSES))

    def _feed_forward(self, h: Hidden, products: GroupedMatmulFn) -> Hidden:
        """What this card adds."""
        weights, moe = self.weights, self.config.moe
        x = rms_norm(h, weights["ffn_norm"], self.config.rms_norm_eps)
        if moe is not None and "experts" in weights:
            bias = weights.get("expert_bias")
            chosen = moe_ffn(x, weights["router"], bias, weights["experts"], moe, products)
            return chosen + self._gated(x, "shared_") if moe.shared_size else chosen
        if "gate" in self._streamed:
            (inner,) = weights["streamed"].products(x, ("gate", "up"), gated=True)
            return matmul(inner, weights["down"])
        return self._gated(x)

    def _gated(self, x: Hidden, prefix: str = "") -> Hidden:
        """A gated feed-forward layer of normed rows; its weights have names that begin with `prefix`."""
        return matmul(self._gated_inner(x, prefix), self.weights[f"{prefix}down"])

    def _gated_inner(self, x: Hidden, prefix: str = "") -> Float[Array, "rows ffn"]:
        """What a gated feed-forward layer multiplies with its matrix "down"."""
        gate, up = (self.weights[f"{prefix}{name}"] for name in ("gate", "up"))
        return jax.nn.silu(matmul(x, gate)) * matmul(x, up)

    def _project_group(self, x: Hidden, name: str, group: Group) -> Heads:
        """A projection of normed rows for one group of heads."""
        heads = (self.config.num_heads if name == "q" else self.config.num_kv_heads) // group.count
        weight, bias = self.weights[name], self.weights.get(f"{name}_bias")
        if group.count > 1:
            start, size = group.index * heads * self.config.head_dim, heads * self.config.head_dim
            weight = some_outputs(weight, start, size)
            bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, size)
        return self._by_heads(name, matmul(x, weight, bias))

    def _by_heads(self, name: str, y: Float[Array, "rows outputs"]) -> Heads:
        """A projection by heads, normed where the model norms it."""
        y = y.reshape(y.shape[0], -1, self.config.head_dim)
        norm = self.weights.get(f"{name}_norm")
        return y if norm is None else rms_norm(y, norm, self.config.rms_norm_eps)

    @property
    def _streamed(self) -> Collection[str]:
        """Weights that are read from the stack of all layers (`jdllm.execution.few_rows.streamed`)."""
        return self.weights["streamed"].weights if "streamed" in self.weights else ()


class Ranges(NamedTuple):
    """Rows that see ranges of keys: a `Sees`.

    - `rows`: their positions and ranges.
    - `rotation`: of their positions.
    - `attention`: the attention to use.
    - `keys_values`: rotated keys, and values, that ranges refer to; `None` for the keys and values of the
      rows.
    - `cards`: how many cards have as many rows each (`jdllm.models.whole_layers`). Ranges refer to the rows
      of all cards.
    """

    rows: Rows
    rotation: Rotation
    attention: AttentionFn
    keys_values: KeysValues | None = None
    cards: int = 1

    def attend(self, layer: Layer, h: Hidden, group: Group = ALL_HEADS) -> tuple[Heads, None]:
        if self.keys_values is None:
            k, v, q = layer.project(h, self.rotation, ("k", "v", "q"), group)
            return self.over(layer, q, *self.of_all_cards(layer, k, v))[0], None
        (q,) = layer.project(h, self.rotation, ("q",), group)
        return self.over(layer, q, *self.keys_values)[0], None

    def of_all_cards(self, layer: Layer, k: Heads, v: Heads) -> KeysValues:
        """The keys and values of all rows, from those of this card's rows."""
        addresses = layer.weights.get(ADDRESSES)
        return joined_rows(k, self.cards, addresses), joined_rows(v, self.cards, addresses)

    def over(self, layer: Layer, q: Heads, k: Heads, v: Heads) -> tuple[Array, Array, Array]:
        """Attention of rotated queries, with residuals."""
        return self.attention(q, k, v, self.rows.k_start, self.rows.k_end, scale=layer.config.attention_scale)
