"""Where weights and the KV pool lie if steps run on several cards (`jdllm.models.cards`)."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jdllm.errors import ConfigError
from jdllm.models.adapter import DraftAdapter
from jdllm.models.cards import ADDRESSES, AXIS
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import VocabularyPart
from jdllm.models.sharding import shardings
from jdllm.models.weights import Params, TensorSpec, abstract_params, layer_stacks, spec_tree
from jdllm.models.whole_layers import WHOLE, WholeLayers, whole_layers_bytes
from jdllm.pallas.device import Target
from jdllm.pallas.exchange import addresses_of, described_addresses, memory_bytes

_SPLIT = ("heads", "ffn")
_KV = "kv_heads"
_BY_ID = ("embed", "head")

Devices = Sequence[Any]
"""Of `jax.Device`, which has no static type."""


def weight_shardings(config: ModelConfig, devices: Devices | None = None) -> Params | None:
    """Where each weight lies, by the keys of the parameter tree; `None` for one card.

    A card has a part of the heads and of the inner widths. It has one of the key-value heads and of the
    vocabulary where parts are equal; where they are not, `in_parts` makes them so.

    Arguments:
    - `devices`: by default the first of each process.

    Raises `ConfigError` where a size is no multiple of the cards, where there are too few, and where the
    processes of several hosts cannot have as many each.
    """
    if config.cards == 1:
        return None
    equal = {_KV: config.on_card().kv_copies == 1, "vocab": config.vocab_size % config.cards == 0}
    split = [*_SPLIT, *(axis for axis, are_equal in equal.items() if are_equal)]
    return shardings(config, _mesh(config, devices), dict.fromkeys(split, AXIS))


def in_parts(params: Params, config: ModelConfig, *, whole_layers: bool = False) -> Params:
    """Weights that lie as `weight_shardings` says, as a step takes them.

    A step has to know of parts of a vocabulary. Where several cards share a key-value head, each gets its
    rows. Cards that can exchange rows of the weights' dtype get `ADDRESSES` beside the weights: a kernel then
    does the sums of steps of few rows.

    Arguments:
    - `whole_layers`: give each card all layers beside its part of them.
    """
    if config.cards == 1:
        return params
    whole = {WHOLE: _whole(params, config)} if whole_layers else {}
    parts = params | {name: _by_id(params[name], config) for name in _BY_ID if name in params}
    stacks = {name: node for name, node in spec_tree(config).items() if isinstance(node, dict)}
    parts |= {name: _copied(params[name], specs, config) for name, specs in stacks.items() if name in params}
    parts |= whole
    norm: Any = params["final_norm"]
    if norm.dtype.itemsize != 2:
        return parts
    described = isinstance(norm, jax.ShapeDtypeStruct)
    addresses = (described_addresses if described else addresses_of)(norm.sharding.mesh)
    return parts if addresses is None else parts | {ADDRESSES: addresses}


def abstract_parts(
    config: ModelConfig, dtype: str, devices: Devices | None = None, *, whole_layers: bool = False
) -> Params:
    """Shapes of the weights as a step takes them, as `in_parts` makes them.

    Arguments:
    - `devices`: on which they lie, for several cards; by default the first of each process.
    - `whole_layers`: give each card all layers beside its part of them.
    """
    params = abstract_params(config, dtype)
    if config.cards == 1:
        return params
    at = weight_shardings(config, devices)
    placed = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), params, at)
    return in_parts(placed, config, whole_layers=whole_layers)


def _whole(params: Params, config: ModelConfig) -> WholeLayers:
    """The layers, all of them on each card."""
    stacks = {name: params[name] for name in layer_stacks(config)}
    at = NamedSharding(params["final_norm"].sharding.mesh, PartitionSpec())
    if isinstance(params["final_norm"], jax.ShapeDtypeStruct):
        stacks = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), stacks)
    else:
        stacks = jax.jit(lambda x: x, out_shardings=at)(stacks)
    return WholeLayers(stacks, dataclasses.replace(config, cards=1), config.cards)


def _by_id(weight: Any, config: ModelConfig) -> VocabularyPart:
    """A matrix with a row for each id, padded so that every card has as many."""
    rows = config.cards * (config.on_card().own_ids or 0)
    at = NamedSharding(weight.sharding.mesh, PartitionSpec(AXIS))
    if isinstance(weight, jax.ShapeDtypeStruct):
        padded: Any = jax.ShapeDtypeStruct((rows, *weight.shape[1:]), weight.dtype, sharding=at)
        return VocabularyPart(padded, config.vocab_size)
    missing = ((0, rows - len(weight)), (0, 0))
    pad = jax.jit(lambda x: jnp.pad(x, missing), out_shardings=at)
    return VocabularyPart(pad(weight), config.vocab_size)


def _copied(stack: Params, specs: dict[str, TensorSpec], config: ModelConfig) -> Params:
    """A stack of layers in which each key-value head is there once for each card that has it."""
    copies = config.on_card().kv_copies
    shared = [name for name, spec in specs.items() if _KV in spec.axes and copies > 1]
    return stack | {name: _repeated(stack[name], config, copies) for name in shared}


def _repeated(weight: Any, config: ModelConfig, copies: int) -> Any:
    """A matrix or a bias of all layers with the rows of each head so often, one part of them on each card."""
    layers, rows, *columns = weight.shape
    at = NamedSharding(weight.sharding.mesh, PartitionSpec(None, AXIS))
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((layers, rows * copies, *columns), weight.dtype, sharding=at)

    def repeat(x: Array) -> Array:
        heads = x.reshape(layers, config.num_kv_heads, -1, *columns)
        return jnp.repeat(heads, copies, axis=1).reshape(layers, rows * copies, *columns)

    return jax.jit(repeat, out_shardings=at)(weight)


def adapter_in_parts(adapter: DraftAdapter, config: ModelConfig) -> DraftAdapter:
    """An adapter for drafts as a step takes it.

    A card has the part of `down` that multiplies its heads, and all of `up`. So it adds its part to what it
    has of the output projection, and the sum over cards is that of both.
    """
    if config.cards == 1:
        return adapter
    mesh = _mesh(config, None)
    down = jax.device_put(adapter.down, NamedSharding(mesh, PartitionSpec(None, None, AXIS)))
    return DraftAdapter(down, jax.device_put(adapter.up, NamedSharding(mesh, PartitionSpec())))


def card_bytes(params: Params) -> int:
    """Bytes that weights take on each of their cards, and what these have for exchanges."""
    weights = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(params)
    )
    return weights + (memory_bytes(len(params[ADDRESSES])) if ADDRESSES in params else 0)


def beside_bytes(config: ModelConfig, dtype: str, device: Target, *, whole_layers: bool) -> int:
    """Bytes that each card has beside its parts of the weights and of the pool, as `in_parts` makes them.

    Arguments:
    - `config`, `dtype`: the model, and the type of its weights.
    - `device`: each card.
    - `whole_layers`: whether each card has all layers too.
    """
    exchanges = config.cards > 1 and device.hopper and jnp.dtype(dtype).itemsize == 2
    whole = whole_layers_bytes(config, dtype) if whole_layers else 0
    return whole + (memory_bytes(config.cards) if exchanges else 0)


def pool_config(config: ModelConfig) -> ModelConfig:
    """The model whose key-value heads the pool of all cards has: each head once for each card that has it."""
    return dataclasses.replace(config, num_kv_heads=config.cards * config.on_card().num_kv_heads)


def pool_sharding(config: ModelConfig, devices: Devices | None = None) -> NamedSharding | None:
    """Of a pool of keys or values: each card has those of its heads. `None` for one card.

    Arguments:
    - `devices`: by default the first of each process.
    """
    if config.cards == 1:
        return None
    return NamedSharding(_mesh(config, devices), PartitionSpec(None, None, AXIS))


def _mesh(config: ModelConfig, devices: Devices | None) -> Mesh:
    """As many devices as the model runs on, in a row."""
    if devices is None:
        devices = _of_each_process(config.cards)
    return Mesh(np.array(devices[: config.cards]), (AXIS,))


def _of_each_process(cards: int) -> Devices:
    """So many devices, of which each process has as many."""
    own = collections.defaultdict[int, list[Any]](list)
    for device in jax.devices():
        own[device.process_index].append(device)
    counts, processes = sorted({len(devices) for devices in own.values()}), len(own)
    if len(counts) > 1:
        raise ConfigError(f"processes have {counts[0]} to {counts[-1]} devices: let each have as many")
    if cards % processes:
        raise ConfigError(
            f"devices is {cards}, and {processes} processes cannot have as many each: expected a multiple of"
            f" {processes}"
        )
    if cards > processes * counts[0]:
        found = "this machine has" if processes == 1 else f"{processes} processes have"
        raise ConfigError(f"devices is {cards}, and {found} {processes * counts[0]}")
    return [device for devices in own.values() for device in devices[: cards // processes]]
