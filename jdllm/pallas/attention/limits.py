"""The forms of attention, and what those for NVIDIA cards can take."""

import jax
import jax.numpy as jnp

from jdllm.pallas.attention.types import Queries
from jdllm.pallas.device import Target
from jdllm.pallas.dispatch import Forms, card_forms

HEAD_DIMS = (64, 128)

MOST_HEAD_DIM = 256
"""Of the Triton kernel."""


def forms(device: Target, q: Queries | jax.ShapeDtypeStruct, scale: float) -> Forms:
    """The forms of attention of `q` on a device."""
    checks = (lambda: check_mosaic_gpu(q, scale)), (lambda: check_triton(q, scale))
    return card_forms(device, "attention", *checks, "xla", "reference")


def check_mosaic_gpu(q: Queries | jax.ShapeDtypeStruct, scale: float) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper kernel cannot attend `q`."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"attention on Hopper takes bfloat16 and float16, not {q.dtype}")
    if q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"attention on Hopper takes heads of {HEAD_DIMS}, not of {q.shape[-1]}")
    if scale <= 0:
        raise NotImplementedError(f"attention on Hopper takes a scale above 0, not {scale}")


def check_triton(q: Queries | jax.ShapeDtypeStruct, scale: float) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Triton kernel cannot attend `q`."""
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"attention in Triton takes bfloat16, float16 and float32, not {q.dtype}")
    if q.shape[-1] > MOST_HEAD_DIM:
        raise NotImplementedError(
            f"attention in Triton takes heads of up to {MOST_HEAD_DIM}, not of {q.shape[-1]}"
        )
    if scale <= 0:
        raise NotImplementedError(f"attention in Triton takes a scale above 0, not {scale}")
