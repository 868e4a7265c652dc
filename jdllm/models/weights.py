"""One spec tree for every weight: shape, logical axes, initial scale and source tensors.

Initialisation, loading, conversion, sharding and byte counts all read this tree. A leaf under `layers`
is stacked over the layers, so that the transformer can scan it; in a model that has layers with and without
experts, `dense_layers` is a second stack, of those without. Layers whose weights are in host memory are a
stack of their own, `host_layers`. Every matrix keeps the published
`[outputs, inputs]` order, so that loading is a plain copy. Experts alone are `[inputs, outputs]`: the grouped
product reads them in this order, and would copy a transposed view of all experts in every layer. Experts in
few bits are `[outputs, inputs]`, since a row of a matrix in few bits has the scales of one output.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jdllm.models.config import ModelConfig
from jdllm.models.leaf import nbytes
from jdllm.models.registry import FAMILIES
from jdllm.quantised import KINDS, Quantised, WeightForm

type Tree[T] = dict[str, T | dict[str, T]]
Params = dict[str, Any]

HOST_LAYERS = "host_layers"
"""The stack of those layers whose weights are in host memory."""

_GATED = ("gate", "up", "down")
_QUANTISED = ("q", "k", "v", "o", *(f"{of}{name}" for of in ("", "shared_", "experts_") for name in _GATED))
_INTO_RESIDUAL = ("layers/o", "layers/down", "layers/experts_down", "layers/shared_down")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One leaf of the parameter tree.

    - `shape`, `axes`: sizes and logical names of all axes, stacking included.
    - `source`: Hugging Face tensor name, with `{layer}` where the leaf is stacked over layers and `{expert}`
      where it is stacked over experts too.
    - `init_std`: standard deviation of a random initialisation; 0 means all ones (norm weights).
    - `layers`: the model's layers that a stacked leaf holds, in order.
    - `transposed`: the source is a matrix in the other order.
    - `first_row`, `source_rows`: a leaf stacked over layers has the rows from `first_row` on of tensors
      with so many rows; `None` where it has all of them.
    - `quantised`: the form of the `Quantised` that takes the place of an array; `None` for an array.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: str
    init_std: float
    layers: tuple[int, ...] = ()
    transposed: bool = False
    first_row: int = 0
    source_rows: int | None = None
    quantised: WeightForm | None = None

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of each source tensor."""
        shape = self.shape[self._stacking :]
        if self.source_rows is not None:
            return (self.source_rows, *shape[1:])
        return shape[::-1] if self.transposed else shape

    def sources(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(source tensor name, index of its place in the leaf) for every source tensor."""
        for place in np.ndindex(self.shape[: self._stacking]):
            layer = self.layers[place[0]] if place else None
            yield self.source.format(layer=layer, expert=place[-1] if place else None), place

    @property
    def _stacking(self) -> int:
        """Leading axes that the leaf has and its sources have not."""
        return ("{layer}" in self.source) + ("{expert}" in self.source)

    def of_layer(self, layer: int) -> "TensorSpec":
        """The leaf that has one of its layers alone."""
        return dataclasses.replace(self, shape=(1, *self.shape[1:]), layers=(layer,))

    def whole(self) -> "TensorSpec":
        """The leaf that has all rows of its source tensors."""
        if self.source_rows is None:
            return self
        shape = (self.shape[0], self.source_rows, *self.shape[2:])
        return dataclasses.replace(self, shape=shape, first_row=0, source_rows=None)

    def struct(self, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct | Quantised:
        """The leaf without its numbers, where weights that are not quantised are of `dtype`."""
        if self.quantised:
            return quantised_struct(self.shape, self.quantised)
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(dtype))

    def zeros(self, dtype: jnp.dtype | str, device: Any = None) -> Any:
        """The leaf with zeros on a device, or as a sharding says; the default device has all if `None`."""
        return jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype, device=device), self.struct(dtype))


@functools.lru_cache(1024)
def quantised_struct(shape: tuple[int, ...], form: WeightForm) -> Quantised:
    """Matrices in few bits without their numbers; a plan asks for the same ones many times."""
    return jax.eval_shape(KINDS[form].of, jax.ShapeDtypeStruct(shape, jnp.float32))


def layer_stacks(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The stacks of the parameter tree, and the layers that each holds."""
    dense = config.moe.dense_layers if config.moe else ()
    others = tuple(layer for layer in range(config.num_layers) if layer not in dense)
    here = len(others) - config.offloaded
    stacks = {"layers": others[:here], HOST_LAYERS: others[here:], "dense_layers": dense}
    return {name: layers for name, layers in stacks.items() if layers}


def layer_runs(config: ModelConfig) -> list[tuple[str, int, int]]:
    """All layers in order, as runs (stack, first, end) of places [first, end) within a stack."""
    place = {
        layer: (name, index)
        for name, layers in layer_stacks(config).items()
        for index, layer in enumerate(layers)
    }
    in_order = [place[layer] for layer in range(config.num_layers)]
    runs = [list(run) for _, run in itertools.groupby(in_order, key=lambda at: at[0])]
    return [(run[0][0], run[0][1], run[-1][1] + 1) for run in runs]


def spec_tree(config: ModelConfig) -> Tree[TensorSpec]:
    """The parameter tree of `config` with a `TensorSpec` at each leaf."""
    names = FAMILIES[config.family].tensor_names

    def leaf(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> TensorSpec:
        return TensorSpec(shape, axes, names[name], _init_std(config, name))

    def stack(layers: tuple[int, ...], leaves: list[_Leaf]) -> dict[str, TensorSpec]:
        specs = {
            name: dataclasses.replace(
                leaf(f"layers/{name}", (len(layers), *shape), ("layers", *axes)),
                layers=layers,
                transposed=name.startswith("experts_") and config.quantization is None,
                quantised=config.form_of(name) if name in _QUANTISED else None,
            )
            for name, shape, axes in leaves
        }
        return _as_rows_of_sources(specs)

    matrix, axes = (config.own_ids or config.vocab_size, config.hidden_size), ("vocab", "hidden")
    tree: Tree[TensorSpec] = {"embed": leaf("embed", matrix, axes)}
    for name, layers in layer_stacks(config).items():
        experts = [] if name == "dense_layers" else _experts(config)
        tree[name] = stack(layers, _attention(config) + (experts or _dense_ffn(config)))
    tree["final_norm"] = leaf("final_norm", (config.hidden_size,), ("hidden",))
    if not config.tied_head:
        tree["head"] = leaf("head", matrix, axes)
    return tree


def _as_rows_of_sources(specs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The leaves of a stack; those with one source are its rows, in their order."""
    rows: dict[str, list[int]] = {}
    for spec in specs.values():
        rows.setdefault(spec.source, []).append(spec.shape[1])
    first, placed = dict.fromkeys(rows, 0), dict(specs)
    for name, spec in specs.items():
        if len(rows[spec.source]) > 1:
            placed[name] = dataclasses.replace(
                spec, first_row=first[spec.source], source_rows=sum(rows[spec.source])
            )
            first[spec.source] += spec.shape[1]
    return placed


type LeafPath = tuple[str, ...]


def stored_specs(config: ModelConfig) -> dict[tuple[LeafPath, ...], TensorSpec]:
    """The leaves as checkpoints store them: leaves that are rows of the same tensors are one.

    Returns them by the paths of these leaves in the spec tree, in the order of their rows.
    """
    found: dict[tuple[str, tuple[int, ...]], list[LeafPath]] = {}
    specs: dict[LeafPath, TensorSpec] = {}
    for keys, spec in jax.tree.leaves_with_path(spec_tree(config), is_leaf=is_spec):
        path = tuple(key.key for key in keys)
        specs[path] = spec
        found.setdefault((spec.source, spec.layers), []).append(path)
    by_row = [tuple(sorted(paths, key=lambda path: specs[path].first_row)) for paths in found.values()]
    return {paths: specs[paths[0]].whole() for paths in by_row}


def layer_specs(config: ModelConfig, layer: int) -> Tree[TensorSpec]:
    """The weights of one layer alone: a stack of one layer, by the stack's name."""
    for name, leaves in spec_tree(config).items():
        if isinstance(leaves, dict) and layer in next(iter(leaves.values())).layers:
            return {name: {leaf: spec.of_layer(layer) for leaf, spec in leaves.items()}}
    raise ValueError(f"no layer {layer} of {config.num_layers}")


type _Leaf = tuple[str, tuple[int, ...], tuple[str, ...]]


def _attention(config: ModelConfig) -> list[_Leaf]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    projections = [("q", q_size, "heads"), ("k", kv_size, "kv_heads"), ("v", kv_size, "kv_heads")]
    leaves: list[_Leaf] = [("attn_norm", (hidden,), ("hidden",))]
    leaves += [(name, (size, hidden), (axis, "hidden")) for name, size, axis in projections]
    if config.qkv_bias:
        leaves += [(f"{name}_bias", (size,), (axis,)) for name, size, axis in projections]
    if config.qk_norm:
        leaves += [(name, (head_dim,), ("head_dim",)) for name in ("q_norm", "k_norm")]
    leaves.append(("o", (hidden, q_size), ("hidden", "heads")))
    leaves.append(("ffn_norm", (hidden,), ("hidden",)))
    return leaves


def _dense_ffn(config: ModelConfig) -> list[_Leaf]:
    return _gated(config.hidden_size, config.intermediate_size)


def _gated(hidden: int, ffn: int, prefix: str = "") -> list[_Leaf]:
    return [
        (f"{prefix}gate", (ffn, hidden), ("ffn", "hidden")),
        (f"{prefix}up", (ffn, hidden), ("ffn", "hidden")),
        (f"{prefix}down", (hidden, ffn), ("hidden", "ffn")),
    ]


def _experts(config: ModelConfig) -> list[_Leaf]:
    """Leaves of a layer with experts; none where the model has no such layer."""
    if config.moe is None:
        return []
    experts, hidden, ffn = config.moe.experts, config.hidden_size, config.moe.expert_size
    leaves: list[_Leaf] = [("router", (experts, hidden), ("experts", "hidden"))]
    if config.moe.expert_bias:
        leaves.append(("expert_bias", (experts,), ("experts",)))
    for name, shape, axes in _gated(hidden, ffn, "experts_"):
        turned = 1 if config.quantization else -1
        leaves.append((name, (experts, *shape[::turned]), ("experts", *axes[::turned])))
    shared = config.moe.shared_size
    return leaves + (_gated(hidden, shared, "shared_") if shared else [])


def _init_std(config: ModelConfig, name: str) -> float:
    if name.endswith("norm"):
        return 0.0
    into_residual = name in _INTO_RESIDUAL
    return 0.02 / math.sqrt(2 * config.num_layers) if into_residual else 0.02


def is_spec(node: object) -> bool:
    """Tells a leaf of the spec tree, for `jax.tree.map(..., is_leaf=is_spec)`."""
    return isinstance(node, TensorSpec)


def abstract_params(config: ModelConfig, dtype: jnp.dtype | str) -> Params:
    """The parameter tree as `ShapeDtypeStruct`s, for compilation without weights."""
    return _abstract(spec_tree(config), dtype)


def _abstract(specs: Tree[TensorSpec], dtype: jnp.dtype | str) -> Params:
    return jax.tree.map(lambda spec: spec.struct(dtype), specs, is_leaf=is_spec)


def param_bytes(config: ModelConfig, dtype: jnp.dtype | str) -> int:
    """Bytes of all weights in `dtype`."""
    return tree_bytes(abstract_params(config, dtype))


def layer_bytes(config: ModelConfig, dtype: jnp.dtype | str, layer: int) -> int:
    """Bytes of the weights of one layer in `dtype`."""
    return tree_bytes(_abstract(layer_specs(config, layer), dtype))


def tree_bytes(params: Params) -> int:
    """Bytes of weights, which may be abstract."""
    return sum(map(nbytes, jax.tree.leaves(params)))


def zero_params(config: ModelConfig, dtype: jnp.dtype | str, shardings: Params | None = None) -> Params:
    """Weights that are all zero: arrays like the weights of the model, for uses without their values.

    Arguments:
    - `shardings`: of each weight, in a tree like the weights'; the default device has all if `None`.
    """
    specs, tree = jax.tree.flatten(spec_tree(config), is_leaf=is_spec)
    placed = [None] * len(specs) if shardings is None else tree.flatten_up_to(shardings)
    zeros = [spec.zeros(dtype, at) for spec, at in zip(specs, placed, strict=True)]
    return jax.tree.unflatten(tree, zeros)


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype | str) -> Params:
    """Random weights: normal with each leaf's `init_std`, norm weights one."""
    specs, treedef = jax.tree.flatten(spec_tree(config), is_leaf=is_spec)

    def draw(spec: TensorSpec, leaf_key: jax.Array) -> jax.Array | Quantised:
        if spec.init_std == 0:
            return jnp.ones(spec.shape, dtype)
        drawn = jax.random.normal(leaf_key, spec.shape, dtype) * jnp.asarray(spec.init_std, dtype)
        return quantise(drawn, spec.quantised) if spec.quantised else drawn

    keys = jax.random.split(key, len(specs))
    return jax.tree.unflatten(treedef, [draw(s, k) for s, k in zip(specs, keys, strict=True)])


@functools.partial(jax.jit, static_argnames=("form", "transposed"))
def quantise(
    matrix: Float[Array, "*stack outputs inputs"], form: WeightForm, *, transposed: bool = False
) -> Quantised:
    """A matrix, or matrices of many layers, in few bits. A `transposed` one is `[inputs, outputs]`."""
    return KINDS[form].of(matrix.mT if transposed else matrix)


def quantised(params: Params, config: ModelConfig) -> Params:
    """Weights with those matrices quantised that the model keeps so; other weights are not copied."""
    plain = spec_tree(config.quantised(None))

    def kept(spec: TensorSpec, wide: TensorSpec, leaf: Any) -> Any:
        return quantise(leaf, spec.quantised, transposed=wide.transposed) if spec.quantised else leaf

    return jax.tree.map(kept, spec_tree(config), plain, params, is_leaf=is_spec)


def head_weights(params: Params) -> jax.Array:
    """The `[vocab, hidden]` output matrix: the embedding where the head is tied to it."""
    return params["head"] if "head" in params else params["embed"]
