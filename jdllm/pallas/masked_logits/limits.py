"""The forms of masked logits, and what those for NVIDIA cards can take."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.device import Target
from jdllm.pallas.dispatch import Form, Operator, forms_of
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


class HeadCall(NamedTuple):
    """A call that holds no logits.

    - `most_rows`: that it can take.
    - `fixed`: bytes that it keeps however many they are.
    - `per_unit`: bytes that it keeps of each `FUSED_UNIT` rows.
    """

    most_rows: int
    fixed: int = 0
    per_unit: int = 0


Operand = Float[Array, "rows d"] | jax.ShapeDtypeStruct


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


def default_call(device: Target, head: Operand, level: Level) -> HeadCall | None:
    """A call of a few rows by default; `None` where their logits exist."""
    row = jax.ShapeDtypeStruct((1, head.shape[1]), head.dtype)
    call = MASKED_LOGITS.default(device, row, head, level).workspace
    return None if call is None else call(head.shape[0], level)


def _call_on_hopper(vocab: int, level: Level) -> HeadCall:
    """A few numbers of every tile of ids are kept for each row."""
    fields = 7 if level >= Level.MOMENTS else 5
    per_row = padded_splits(-(-vocab // MAX_COLUMNS)) * fields * 4
    return HeadCall(MAX_ROWS[level], per_unit=FUSED_UNIT * per_row)


def _call_in_triton(vocab: int, level: Level) -> HeadCall:
    return HeadCall(MOST_AT_ONCE, fixed=PARTIAL_BYTES)


MASKED_LOGITS = Operator(
    "masked logits",
    forms_of(
        "jdllm.pallas.masked_logits",
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu", hints=("count",), workspace=_call_on_hopper),
        Form("triton", check_triton, "triton", hints=("count",), workspace=_call_in_triton),
        Form("xla"),
    ),
)
"""Checked by rows, the output matrix and the level. Workspaces are asked for a vocabulary and a level; forms
without one hold logits."""
