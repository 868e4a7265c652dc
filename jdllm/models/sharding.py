"""Where a weight lies on a mesh of devices: the axis names of the spec tree, and rules that map them."""

from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, TensorSpec, is_spec, spec_tree

AXES = ("layers", "vocab", "hidden", "heads", "kv_heads", "head_dim", "ffn", "experts")
"""The axis names that weights of any model have."""

Rules = Mapping[str, str]
"""Axis name of the spec tree -> axis of the mesh; axes without a rule are not cut."""


def shardings(config: ModelConfig, mesh: Mesh, rules: Rules) -> Params:
    """The sharding of every weight.

    Arguments:
    - `config`: the model.
    - `mesh`: the devices.
    - `rules`: such as `{"heads": "model", "kv_heads": "model", "ffn": "model", "vocab": "model"}`; names that
      this model does not have are passed over.

    Returns the tree of `jdllm.models.weights.spec_tree` with a `NamedSharding` for each leaf.

    Raises `ConfigError` for a name outside of `AXES` or of the mesh, for an axis that its devices
    do not divide, and for a weight of which two axes go to one axis of the mesh.
    """
    for name, on_mesh in rules.items():
        if name not in AXES:
            raise ConfigError(f"rules: no weight has an axis {name!r}: expected {', '.join(AXES)}")
        if on_mesh not in mesh.shape:
            raise ConfigError(f"rules: the mesh has no axis {on_mesh!r}: expected {', '.join(mesh.shape)}")
    # XLA partitions the products; axes that JAX makes explicit would need a sharding at each of them.
    automatic = Mesh(mesh.devices, mesh.axis_names)
    return jax.tree.map(lambda spec: _sharding(spec, automatic, rules), spec_tree(config), is_leaf=is_spec)


def _sharding(spec: TensorSpec, mesh: Mesh, rules: Rules) -> NamedSharding:
    on_mesh = [rules.get(name) for name in spec.axes]
    used = [name for name in on_mesh if name is not None]
    if len(set(used)) < len(used):
        raise ConfigError(f"rules: {spec.source} {list(spec.axes)} would be cut twice along {used[0]!r}")
    for name, size, axis in zip(spec.axes, spec.shape, on_mesh, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"rules: {name!r} of {spec.source} is {size}, which {mesh.shape[axis]} devices along"
                f" {axis!r} do not divide"
            )
    return NamedSharding(mesh, PartitionSpec(*on_mesh))
