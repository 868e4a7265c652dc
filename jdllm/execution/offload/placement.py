"""Which layers' weights are in host memory, and the bytes that this leaves on the device."""

import dataclasses

import jax.numpy as jnp

from jdllm.models.config import ModelConfig
from jdllm.models.weights import layer_bytes, param_bytes

LAYERS_ON_DEVICE = 2
"""Layers out of host memory that are on the device at a time: one is computed, one arrives."""


def offloaded_layers(config: ModelConfig, count: int) -> frozenset[int]:
    """`count` of the model's layers, spread evenly: while others are computed, the next of them arrives."""
    return frozenset((i + 1) * config.num_layers // count - 1 for i in range(count))


def single_layer(config: ModelConfig, stack: str) -> ModelConfig:
    """The model that has one layer only, one of `stack`."""
    dense = (0,) if stack == "dense_layers" else ()
    moe = config.moe and dataclasses.replace(config.moe, dense_layers=dense)
    return dataclasses.replace(config, num_layers=1, moe=moe)


def device_weight_bytes(config: ModelConfig, dtype: jnp.dtype | str, offloaded: int) -> int:
    """Bytes of weights on the device where so many layers are in host memory.

    The head and the norm before it stay, and the embedding where the head is tied to it; a separate embedding
    is in host memory too. Where layers are in host memory, two that arrived from there are on the device.
    """
    if not offloaded:
        return param_bytes(config, dtype)
    away = host_weight_bytes(config, dtype, offloaded)
    arrived = max(layer_bytes(config, dtype, layer) for layer in offloaded_layers(config, offloaded))
    return param_bytes(config, dtype) - away + LAYERS_ON_DEVICE * arrived


def host_weight_bytes(config: ModelConfig, dtype: jnp.dtype | str, offloaded: int) -> int:
    """Bytes of weights in host memory, where so many layers are `offloaded`."""
    if not offloaded:
        return 0
    embedding = 0 if config.tied_head else config.vocab_size * config.hidden_size * jnp.dtype(dtype).itemsize
    return embedding + streamed_bytes(config, dtype, offloaded)


def streamed_bytes(config: ModelConfig, dtype: jnp.dtype | str, offloaded: int) -> int:
    """Bytes that each step moves to the device, where so many layers are `offloaded`."""
    return sum(layer_bytes(config, dtype, layer) for layer in offloaded_layers(config, offloaded))
