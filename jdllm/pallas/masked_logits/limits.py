"""What the Hopper form of masked logits can take."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.masked_logits.tiles import DEPTH, STRIP
from jdllm.pallas.masked_logits.types import Level

MAX_ROWS = {Level.TOP: 2048, Level.MOMENTS: 1024}
"""Rows of one call: what is kept of each tile of ids exists for all of them, at most 32 MiB with 157k ids."""

Operand = Float[Array, "rows d"] | jax.ShapeDtypeStruct


def check_mosaic_gpu(hidden: Operand, head: Operand, level: Level) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper head cannot take these operands."""
    if level >= Level.FILTERED:
        raise NotImplementedError("the Hopper head does not filter by top-k or top-p")
    if hidden.dtype not in (jnp.bfloat16, jnp.float16) or hidden.dtype != head.dtype:
        raise NotImplementedError(
            "the Hopper head takes rows and weights that are both bfloat16 or both float16, "
            f"not {hidden.dtype} and {head.dtype}"
        )
    vocab, depth = head.shape
    if depth % DEPTH or vocab % STRIP:
        raise NotImplementedError(
            f"the Hopper head takes hidden sizes that are multiples of {DEPTH} and vocabularies that are "
            f"multiples of {STRIP}, not {depth} and {vocab}"
        )
    if hidden.shape[0] > MAX_ROWS[level]:
        raise NotImplementedError(
            f"the Hopper head takes at most {MAX_ROWS[level]} rows at {level.name}, not {hidden.shape[0]}"
        )
