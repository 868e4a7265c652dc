"""Functions that run on several cards at once, each with its part of the model (`jdllm.models.cards`)."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm.models.config import ModelConfig

_EVERYWHERE = PartitionSpec()


def mesh_of(args: Any) -> Mesh | None:
    """The cards over which any of these arrays is spread; `None` where each lies on one device."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def over_processes(args: Any) -> bool:
    """Whether any of these arrays is spread over cards of several processes: each has to decide the same."""
    mesh = mesh_of(args)
    return mesh is not None and mesh.is_multi_process


def placements(leaves: Sequence[Any], mesh: Mesh) -> list[NamedSharding]:
    """Where a call puts each argument: arrays that are not spread are the same on every card."""
    return [NamedSharding(mesh, spec_of(leaf)) for leaf in leaves]


def everywhere(x: Any, args: Any) -> Any:
    """The arrays of `x` on all cards over which any of `args` is spread: no step has to send them there."""
    whole = whole_on_each(args)
    return x if whole is None else jax.device_put(x, whole)


def whole_on_each(args: Any) -> NamedSharding | None:
    """Where an array lies that all cards have over which these arrays are spread; `None` for one card."""
    mesh = mesh_of(args)
    return None if mesh is None else NamedSharding(mesh, _EVERYWHERE)


def part_of_card(args: Any) -> Any:
    """The shapes of what each card has of these arrays, in the same tree: those not spread are whole."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        own = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return jax.ShapeDtypeStruct(own, leaf.dtype)

    return jax.tree.map(shape, args)


def bound(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    static: Mapping[str, Hashable],
    donated: Sequence[int],
    mesh: Mesh | None,
) -> Callable[..., Any]:
    """`function(*args, **static)` as a function of the arguments alone, on all cards of a mesh.

    Arguments:
    - `args`: trees of arrays. A card gets its part of those that are spread, and all of the others.
    - `static`: on several cards, configurations among them become those of a card's part.
    - `donated`: places of arguments whose memory results may take. The one of them that is spread is the last
      result, spread in the same way. Other results are the same on all cards.
    - `mesh`: the cards, `None` for one.
    """
    if mesh is None:
        return functools.partial(function, **static)
    own = {
        name: value.on_card() if isinstance(value, ModelConfig) else value for name, value in static.items()
    }
    specs = jax.tree.map(spec_of, args)
    given_back = [specs[place] for place in donated]
    spread = [tree for tree in given_back if any(spec != _EVERYWHERE for spec in jax.tree.leaves(tree))]
    results = (_EVERYWHERE, *spread) if spread else _EVERYWHERE
    # Whether results are the same on all cards cannot be told of kernels.
    return jax.shard_map(
        functools.partial(function, **own), mesh=mesh, in_specs=specs, out_specs=results, check_vma=False
    )


def spec_of(leaf: Any) -> PartitionSpec:
    """Along which axes an array is spread over cards; along none where it lies on one device."""
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else _EVERYWHERE
