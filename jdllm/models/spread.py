"""Where the weights and the KV pool of a model lie whose steps run on several cards."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm.errors import ConfigError
from jdllm.models.cards import AXIS
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import VocabularyPart
from jdllm.models.weights import Params, TensorSpec, is_spec, spec_tree

_SPLIT = ("heads", "kv_heads", "ffn")
"""Logical axes of which each card has a part; a vocabulary is split too where all parts are equal."""

_BY_ID = ("embed", "head")


def mesh_of(cards: int) -> Mesh:
    """So many of this machine's devices, in a row. Raises `ConfigError` where there are fewer."""
    devices = jax.local_devices()
    if cards > len(devices):
        raise ConfigError(f"devices is {cards}, and this machine has {len(devices)}")
    return Mesh(np.array(devices[:cards]), (AXIS,))


def shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """Where each weight lies, by the keys of the parameter tree."""

    def of(spec: TensorSpec) -> NamedSharding:
        split = (*_SPLIT, "vocab") if _parts_of_vocabulary(config) else _SPLIT
        return NamedSharding(mesh, PartitionSpec(*(AXIS if axis in split else None for axis in spec.axes)))

    return jax.tree.map(of, spec_tree(config), is_leaf=is_spec)


def in_parts(params: Params, config: ModelConfig) -> Params:
    """Weights that lie as `shardings` says, as a step takes them: it has to know of parts of a vocabulary."""
    if not _parts_of_vocabulary(config):
        return params
    return params | {name: VocabularyPart(params[name]) for name in _BY_ID if name in params}


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Of a pool of keys or values: each card has those of its heads."""
    return NamedSharding(mesh, PartitionSpec(None, None, AXIS))


def _parts_of_vocabulary(config: ModelConfig) -> bool:
    return config.vocab_size % config.cards == 0
