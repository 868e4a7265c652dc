"""One spec tree for every weight: shape, logical axes, initial scale and source tensors.

Initialisation, loading, conversion, sharding and byte counts all read this tree. A leaf under `layers`
is stacked over the layers, so that the transformer can scan it; every matrix keeps the published
`[outputs, inputs]` order, so that loading is a plain copy.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.models.config import ModelConfig

type Tree[T] = dict[str, T | dict[str, T]]
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One leaf of the parameter tree.

    - `shape`, `axes`: sizes and logical names of all axes, stacking included.
    - `source`: Hugging Face tensor name, with `{layer}` where the leaf is stacked over layers.
    - `init_std`: standard deviation of a random initialisation; 0 means all ones (norm weights).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: str
    init_std: float

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of each source tensor."""
        return self.shape[1:] if self.stacked else self.shape

    def sources(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(source tensor name, index of its place in the leaf) for every source tensor."""
        if not self.stacked:
            yield self.source, ()
            return
        for layer in range(self.shape[0]):
            yield self.source.format(layer=layer), (layer,)

    def struct(self, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(dtype))


def spec_tree(config: ModelConfig) -> Tree[TensorSpec]:
    """The parameter tree of `config` with a `TensorSpec` at each leaf."""
    from jdllm.models.registry import FAMILIES

    names = FAMILIES[config.family].tensor_names
    hidden, ffn, layers = config.hidden_size, config.intermediate_size, config.num_layers
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def leaf(path: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> TensorSpec:
        std = 0.0 if path.endswith("norm") else 0.02
        if path in ("layers/o", "layers/down"):
            std /= math.sqrt(2 * layers)
        if path.startswith("layers/"):
            shape, axes = (layers, *shape), ("layers", *axes)
        return TensorSpec(shape, axes, names[path], std)

    tree: Tree[TensorSpec] = {
        "embed": leaf("embed", (config.vocab_size, hidden), ("vocab", "hidden")),
        "layers": {
            name: leaf(f"layers/{name}", shape, axes)
            for name, shape, axes in (
                ("attn_norm", (hidden,), ("hidden",)),
                ("q", (q_size, hidden), ("heads", "hidden")),
                ("k", (kv_size, hidden), ("kv_heads", "hidden")),
                ("v", (kv_size, hidden), ("kv_heads", "hidden")),
                ("o", (hidden, q_size), ("hidden", "heads")),
                ("ffn_norm", (hidden,), ("hidden",)),
                ("gate", (ffn, hidden), ("ffn", "hidden")),
                ("up", (ffn, hidden), ("ffn", "hidden")),
                ("down", (hidden, ffn), ("hidden", "ffn")),
            )
        },
        "final_norm": leaf("final_norm", (hidden,), ("hidden",)),
    }
    if not config.tied_head:
        tree["head"] = leaf("head", (config.vocab_size, hidden), ("vocab", "hidden"))
    return tree


def is_spec(node: object) -> bool:
    """Tells a leaf of the spec tree, for `jax.tree.map(..., is_leaf=is_spec)`."""
    return isinstance(node, TensorSpec)


def abstract_params(config: ModelConfig, dtype: jnp.dtype | str) -> Params:
    """The parameter tree as `ShapeDtypeStruct`s, for compilation without weights."""
    return jax.tree.map(lambda spec: spec.struct(dtype), spec_tree(config), is_leaf=is_spec)


def param_bytes(config: ModelConfig, dtype: jnp.dtype | str) -> int:
    """Bytes of all weights in `dtype`."""
    leaves = jax.tree.leaves(spec_tree(config), is_leaf=is_spec)
    return sum(math.prod(spec.shape) for spec in leaves) * np.dtype(dtype).itemsize


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype | str) -> Params:
    """Random weights: normal with each leaf's `init_std`, norm weights one."""
    specs, treedef = jax.tree.flatten(spec_tree(config), is_leaf=is_spec)

    def draw(spec: TensorSpec, leaf_key: jax.Array) -> jax.Array:
        if spec.init_std == 0:
            return jnp.ones(spec.shape, dtype)
        return jax.random.normal(leaf_key, spec.shape, dtype) * jnp.asarray(spec.init_std, dtype)

    keys = jax.random.split(key, len(specs))
    return jax.tree.unflatten(treedef, [draw(s, k) for s, k in zip(specs, keys, strict=True)])


def head_weights(params: Params) -> jax.Array:
    """The `[vocab, hidden]` output matrix: the embedding where the head is tied to it."""
    return params.get("head", params["embed"])
