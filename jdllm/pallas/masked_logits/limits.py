"""What the Hopper form of masked logits can take."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.dispatch import limit
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.masked_logits.tiles import DEPTH, MAX_COLUMNS, padded_splits
from jdllm.pallas.masked_logits.types import Level

MAX_ROWS = {Level.TOP: 2048, Level.MOMENTS: 1024}
"""Rows of one call: what is kept of each tile of ids exists for all of them, at most 32 MiB with 157k ids."""

FUSED_UNIT = 256
"""Rows of one call are padded to a multiple of this, or to one of its halves."""

Operand = Float[Array, "rows d"] | jax.ShapeDtypeStruct


def check_mosaic_gpu(hidden: Operand, head: Operand, level: Level) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper head cannot take these operands."""
    _check_operands(hidden.dtype, head, level)
    if hidden.shape[0] > MAX_ROWS[level]:
        raise NotImplementedError(
            f"the Hopper head takes at most {MAX_ROWS[level]} rows at {level.name}, not {hidden.shape[0]}"
        )


def fused_rows(head: Operand, level: Level) -> int | None:
    """Rows that a call on Hopper can take with this output matrix; `None` if it can take none."""
    return MAX_ROWS[level] if limit(lambda: _check_operands(head.dtype, head, level)) is None else None


def partial_bytes(vocab: int, level: Level) -> int:
    """Bytes that a call on Hopper keeps for each padded row: a few numbers of every tile of ids."""
    fields = 7 if level >= Level.MOMENTS else 5
    return padded_splits(-(-vocab // MAX_COLUMNS)) * fields * 4


def _check_operands(dtype: jnp.dtype, head: Operand, level: Level) -> None:
    if level >= Level.FILTERED:
        raise NotImplementedError("the Hopper head does not filter by top-k or top-p")
    if dtype not in (jnp.bfloat16, jnp.float16) or dtype != head.dtype:
        raise NotImplementedError(
            "the Hopper head takes rows and weights that are both bfloat16 or both float16, "
            f"not {dtype} and {head.dtype}"
        )
    vocab, depth = head.shape
    if depth % DEPTH or vocab % STRIP:
        raise NotImplementedError(
            f"the Hopper head takes hidden sizes that are multiples of {DEPTH} and vocabularies that are "
            f"multiples of {STRIP}, not {depth} and {vocab}"
        )
