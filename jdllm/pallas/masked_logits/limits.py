"""The forms of masked logits, and what those for NVIDIA cards can take."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.device import Target
from jdllm.pallas.dispatch import Forms, card_forms, default_form
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.masked_logits.tiles import DEPTH, MAX_COLUMNS, padded_splits
from jdllm.pallas.masked_logits.types import Level

MOST_AT_ONCE = 4096
"""Rows of one call of the kernel in Triton: as many as fill a card, so that few are gathered at a time."""

PROGRAMS = 1024
"""Programs of the kernel in Triton, each of at most `MOST_ROWS` rows: enough to keep any card busy."""

MOST_ROWS = 128
PARTIAL_BYTES = PROGRAMS * MOST_ROWS * 7 * 4
"""Bytes that the kernel in Triton keeps at most."""

MAX_ROWS = {Level.TOP: 2048, Level.MOMENTS: 1024}
"""Rows of one call: what is kept of each tile of ids exists for all of them, at most 32 MiB with 157k ids."""

FUSED_UNIT = 256
"""Rows of one call are padded to a multiple of this, or to one of its halves."""

Operand = Float[Array, "rows d"] | jax.ShapeDtypeStruct


def forms(device: Target, hidden: Operand, head: Operand, level: Level) -> Forms:
    """The forms of masked logits of `hidden` on a device."""
    checks = (lambda: check_mosaic_gpu(hidden, head, level)), (lambda: check_triton(hidden, head, level))
    return card_forms(device, "masked logits", *checks, "xla")


def check_mosaic_gpu(hidden: Operand, head: Operand, level: Level) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper head cannot take these operands."""
    _check_operands(hidden.dtype, head, level)
    if hidden.shape[0] > MAX_ROWS[level]:
        raise NotImplementedError(
            f"the Hopper head takes at most {MAX_ROWS[level]} rows at {level.name}, not {hidden.shape[0]}"
        )


def check_triton(hidden: Operand, head: Operand, level: Level) -> None:
    """Raise `NotImplementedError`, naming the limit, where the head in Triton cannot take these operands."""
    if level >= Level.FILTERED:
        raise NotImplementedError("the head in Triton does not filter by top-k or top-p")
    if hidden.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or hidden.dtype != head.dtype:
        raise NotImplementedError(
            "the head in Triton takes rows and weights that are both bfloat16, float16 or float32, "
            f"not {hidden.dtype} and {head.dtype}"
        )


def head_form(device: Target, head: Operand, level: Level) -> str | None:
    """The form of masked logits of a few rows by default."""
    row = jax.ShapeDtypeStruct((1, head.shape[1]), head.dtype)
    return default_form(forms(device, row, head, level), device.kernels)


def fused_rows(device: Target, head: Operand, level: Level) -> int | None:
    """Rows that a call can take by default without their logits; `None` where these exist."""
    most = {"mosaic_gpu": MAX_ROWS.get(level), "triton": MOST_AT_ONCE, "xla": None}
    return most[head_form(device, head, level) or "xla"]


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
