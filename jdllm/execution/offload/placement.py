"""The bytes that layers whose weights are in host memory leave on the device."""

import dataclasses

import jax.numpy as jnp

from jdllm.models.config import ModelConfig
from jdllm.models.weights import HOST_LAYERS, layer_bytes, layer_stacks, param_bytes

LAYERS_ON_DEVICE = 2
"""Layers out of host memory that are on the device at a time: one is computed, one arrives."""


def most_offloaded(config: ModelConfig) -> int:
    """How many layers may be in host memory: all of the larger stack."""
    return len(layer_stacks(dataclasses.replace(config, offloaded=0))["layers"])


def host_weight_bytes(config: ModelConfig, dtype: jnp.dtype | str, offloaded: int) -> int:
    """Bytes of weights in host memory, which each step moves to the device."""
    layers = layer_stacks(dataclasses.replace(config, offloaded=offloaded)).get(HOST_LAYERS, ())
    return sum(layer_bytes(config, dtype, layer) for layer in layers)


def arriving_bytes(streamed: int, offloaded: int) -> int:
    """Bytes of the device for layers that arrive from host memory, where `offloaded` layers have `streamed`
    bytes there."""
    return LAYERS_ON_DEVICE * streamed // max(1, offloaded)


def device_weight_bytes(config: ModelConfig, dtype: jnp.dtype | str, offloaded: int) -> int:
    """Bytes of weights on the device where so many layers are in host memory, those that arrive included."""
    away = host_weight_bytes(config, dtype, offloaded)
    return param_bytes(config, dtype) - away + arriving_bytes(away, offloaded)
