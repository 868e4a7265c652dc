"""The parts of a layer as NNX modules: attention, feed-forward or experts, a layer, and a stack of layers.

Parameters have the names and shapes of the spec tree (`jdllm.models.weights`). A stack holds each of them
once, with the layers along its first axis: this is the form that a device loop reads, that checkpoints are
loaded into and that `LLM` takes, so that no second copy of the weights exists. A single layer is cut out of
its stack when somebody asks for it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jdllm.execution import dense
from jdllm.execution.dense import Sees
from jdllm.models import layer, moe
from jdllm.models.config import ModelConfig

Hidden = Float[Array, "batch length hidden"]
Leaves = Mapping[str, Any]
"""Weights of a layer or of a stack, by their names in the spec tree."""
Axes = Mapping[str, tuple[str, ...]]
"""The logical names of the axes of each weight."""

_GATED = ("gate", "up", "down")
_FEED_FORWARD = ("ffn_norm", *_GATED)
_EXPERTS = ("ffn_norm", "router", "expert_bias", *(f"{a}_{b}" for a in ("experts", "shared") for b in _GATED))


def param(leaf: Any, axes: tuple[str, ...]) -> nnx.Param:
    """A parameter that knows the logical names of its axes, for `nnx.get_partition_spec`."""
    return nnx.Param(leaf, out_sharding=axes, eager_sharding=False)


class NamedLeaves(nnx.Module):
    """Named parameters.

    Arguments:
    - `config`: the model.
    - `leaves`: the weights.
    - `axes`: of the weights.
    """

    def __init__(self, config: ModelConfig, leaves: Leaves, axes: Axes):
        self.config = config
        for name, leaf in leaves.items():
            setattr(self, name, param(leaf, axes[name]))

    def leaves(self) -> dict[str, Any]:
        """The weights by name."""
        return {name: x.get_value() for name, x in vars(self).items() if isinstance(x, nnx.Param)}


class Attention(NamedLeaves):
    """The attention of a layer, its norm included.

    Parameters: `attn_norm`, `q`, `k`, `v`, `o`, and where the model has them `q_bias`, `k_bias`, `v_bias`,
    `q_norm` and `k_norm`.
    """

    attn_norm: nnx.Param
    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    o: nnx.Param

    def __call__(self, h: Hidden, sees: Sees) -> Hidden:
        """What attention adds to the hidden states `h`."""
        whole = layer.Layer(self.leaves(), self.config)
        q, k, v = whole.project(h.reshape(-1, h.shape[-1]), sees.rotation, ("q", "k", "v"))
        o = sees.attend(q, k, v, self.config.attention_scale)
        return whole.project_back(o).reshape(h.shape)


class FeedForward(NamedLeaves):
    """The feed-forward part of a layer, its norm included: `ffn_norm`, `gate`, `up` and `down`."""

    ffn_norm: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __call__(self, h: Hidden) -> Hidden:
        """What this part adds to the hidden states `h`."""
        whole = layer.Layer(self.leaves(), self.config)
        return whole.feed_forward(h.reshape(-1, h.shape[-1])).reshape(h.shape)


class Experts(NamedLeaves):
    """A mixture of experts, its norm included.

    Parameters: `ffn_norm`, `router`, `experts_gate`, `experts_up`, `experts_down`, and where the model has
    them `expert_bias`, `shared_gate`, `shared_up` and `shared_down`.
    """

    ffn_norm: nnx.Param
    router: nnx.Param
    experts_gate: nnx.Param
    experts_up: nnx.Param
    experts_down: nnx.Param

    def __call__(self, h: Hidden) -> Hidden:
        """What the experts add to the hidden states `h`."""
        leaves = self.leaves()
        gate, up, down = (leaves.pop(f"experts_{name}") for name in _GATED)
        experts = moe.Experts(gate, up, down, first=0, per_layer=len(gate))
        whole = layer.Layer(leaves | {"experts": experts}, self.config)
        return whole.feed_forward(h.reshape(-1, h.shape[-1]), dense.grouped_matmul).reshape(h.shape)


class Layer(nnx.Module):
    """One layer: `attention`, and `feed_forward` or `experts`.

    Arguments:
    - `config`: the model.
    - `leaves`: the weights.
    - `axes`: of the weights.
    """

    def __init__(self, config: ModelConfig, leaves: Leaves, axes: Axes):
        self.config = config
        has_experts = "router" in leaves
        names = _EXPERTS if has_experts else _FEED_FORWARD
        second = {name: leaves[name] for name in names if name in leaves}
        self.attention = Attention(config, {n: x for n, x in leaves.items() if n not in second}, axes)
        if has_experts:
            self.experts = Experts(config, second, axes)
        else:
            self.feed_forward = FeedForward(config, second, axes)

    def leaves(self) -> dict[str, Any]:
        """The weights by name."""
        return self.attention.leaves() | self._second.leaves()

    def __call__(self, h: Hidden, sees: Sees) -> Hidden:
        """The hidden states after the layer.

        Arguments:
        - `h`: the hidden states before the layer.
        - `sees`: what the tokens see of each other, by `Transformer.sees`.
        """
        h = h + self.attention(h, sees)
        return h + self._second(h)

    @property
    def _second(self) -> FeedForward | Experts:
        return self.experts if hasattr(self, "experts") else self.feed_forward


class Layers(Layer):
    """All layers of one kind. Each parameter has the layers along its first axis.

    `layers[number]` is a `Layer` with a copy of its weights, and iterating gives all of them. To change a
    layer, assign to the parameters of the stack.

    Arguments:
    - `config`: the model.
    - `leaves`, `axes`: the stacked weights, and their axes.
    - `name`: of the stack in the spec tree.
    - `numbers`: the numbers of the layers in the model, in order.
    """

    def __init__(
        self, config: ModelConfig, leaves: Leaves, axes: Axes, *, name: str, numbers: tuple[int, ...]
    ):
        super().__init__(config, leaves, axes)
        self.name = name
        self.numbers = numbers
        self._axes = tuple((leaf, names[1:]) for leaf, names in axes.items())

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Layer]:
        return (self[number] for number in self.numbers)

    def __getitem__(self, number: int) -> Layer:
        if number not in self.numbers:
            raise IndexError(f"{self.name} has no layer {number}: it has {', '.join(map(str, self.numbers))}")
        place = self.numbers.index(number)
        return self._layer({name: leaf[place] for name, leaf in self.leaves().items()})

    def run(self, h: Hidden, sees: Sees, first: int, end: int, *, remat: bool) -> Hidden:
        """Apply the layers at the places from `first` to `end` in a device loop.

        Arguments:
        - `h`: the hidden states before the first of these layers.
        - `sees`: what the tokens see of each other.
        - `remat`: keep one hidden state for each layer for the gradient, and compute the rest of the layer
          once more.
        """

        def step(h: Hidden, leaves: dict[str, Array]) -> tuple[Hidden, None]:
            return self._layer(leaves)(h, sees), None

        whole = (first, end) == (0, len(self))
        leaves = {name: leaf if whole else leaf[first:end] for name, leaf in self.leaves().items()}
        h, _ = lax.scan(jax.checkpoint(step) if remat else step, h, leaves)
        return h

    def _layer(self, leaves: Leaves) -> Layer:
        return Layer(self.config, leaves, dict(self._axes))
