"""Where weights and the KV pool lie if steps run on several cards (`jdllm.models.cards`)."""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm.errors import ConfigError
from jdllm.models.cards import AXIS
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import VocabularyPart
from jdllm.models.sharding import shardings
from jdllm.models.weights import Params

_SPLIT = ("heads", "kv_heads", "ffn")
_BY_ID = ("embed", "head")


def weight_shardings(config: ModelConfig) -> Params:
    """Where each weight lies, by the keys of the parameter tree.

    A card has a part of the heads and of the inner widths, and of the vocabulary where all parts are equal.

    Raises `ConfigError` where a size is no multiple of the cards, and where this machine has too few.
    """
    config.on_card()
    split = (*_SPLIT, "vocab") if _parts_of_vocabulary(config) else _SPLIT
    return shardings(config, _mesh(config), dict.fromkeys(split, AXIS))


def in_parts(params: Params, config: ModelConfig) -> Params:
    """Weights that lie as `weight_shardings` says, as a step takes them: it has to know of parts of a
    vocabulary."""
    if not _parts_of_vocabulary(config):
        return params
    return params | {name: VocabularyPart(params[name]) for name in _BY_ID if name in params}


def card_bytes(params: Params) -> int:
    """Bytes that weights take on each of their cards."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(params)
    )


def pool_sharding(config: ModelConfig) -> NamedSharding | None:
    """Of a pool of keys or values: each card has those of its heads. `None` for one card."""
    return NamedSharding(_mesh(config), PartitionSpec(None, None, AXIS)) if config.cards > 1 else None


def _mesh(config: ModelConfig) -> Mesh:
    """The first devices of this machine, in a row."""
    devices = jax.local_devices()
    if config.cards > len(devices):
        raise ConfigError(f"devices is {config.cards}, and this machine has {len(devices)}")
    return Mesh(np.array(devices[: config.cards]), (AXIS,))


def _parts_of_vocabulary(config: ModelConfig) -> bool:
    return config.vocab_size % config.cards == 0
