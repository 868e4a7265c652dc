"""Layers whose weights arrive from host memory while a step runs."""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Int

from jdllm.models.layer import Weights


def arrived(stack: Weights, place: Int[Array, ""] | int) -> dict[str, Any]:
    """The stack of one layer on the device: a copy of the layer at a place of a stack in host memory.

    XLA copies side by side with what it computes, and begins a copy as early as nothing keeps it from that:
    `place` or `stack` has to depend on what the layers before have made, or all layers arrive at once.
    """

    def copy(part: Array) -> Array:
        return jax.device_put(lax.dynamic_slice_in_dim(part, place, 1), jax.memory.Space.Device)

    return jax.tree.map(copy, dict(stack))
