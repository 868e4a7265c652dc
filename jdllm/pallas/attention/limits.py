"""The forms of attention, and what those for NVIDIA cards can take."""

import jax
import jax.numpy as jnp

from jdllm.pallas.attention.types import Queries
from jdllm.pallas.dispatch import Form, Operator, forms_of

HEAD_DIMS = (64, 128)

MOST_HEAD_DIM = 256
"""Of the Triton kernel."""

SCORE_TILE = 512
"""Rows, and keys, whose scores the portable form has in memory on a card."""


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


ATTENTION = Operator(
    "attention",
    forms_of(
        "jdllm.pallas.attention",
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu", hints=("ranges",), workspace=0),
        Form("triton", check_triton, "triton", workspace=0),
        Form("xla", workspace=SCORE_TILE),
        Form("reference"),
    ),
)
"""Checked by queries and scale. Workspaces are rows, and keys, whose scores are in memory."""
