"""Masked logits: the entry point and the choice of a form."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from jdllm.pallas.device import target
from jdllm.pallas.masked_logits.limits import MASKED_LOGITS, default_call
from jdllm.pallas.masked_logits.types import Level, RowDecision, RowSampling

Implementation = Literal["mosaic_gpu", "triton", "xla"]


def masked_logits(
    hidden: Float[Array, "rows d"],
    head: Float[Array, "vocab d"],
    rows: RowSampling,
    level: Level,
    *,
    count: Int[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
) -> RowDecision:
    """Choose a token for each row and measure the model's distribution.

    Arguments:
    - `hidden`: normed hidden rows, a bounded chunk.
    - `head`: the output matrix.
    - `rows`: how each row is drawn; its token is argmax(logits + temperature * Gumbel), a sample of
      softmax(logits / temperature).
    - `level`: static; at least what any row's measure and filters need.
    - `count`: rows from here on need not be computed, and what they return is unspecified; by default, and
      where it exceeds them, all rows are.
    - `implementation`: "mosaic_gpu" (for Hopper) or "triton" (from Ampere on, by the extras cuda12 and
      cuda13), neither of which holds logits, or "xla" (portable; the logits of all rows exist in f32); by
      default the first that can run and is not turned off.

    Returns a `RowDecision` of `[rows]` arrays. The forms differ by rounding; tokens are the same unless two
    logits, with their noise, are as close as that.

    Raises `NotImplementedError` where the given implementation cannot run, naming its limit.
    """
    form = MASKED_LOGITS.choose(target(), implementation, hidden, head, level)
    return form(hidden, head, rows, level, hints={"count": count})


def rows_at_once(
    rows: int, chunks: int, head: Float[Array, "vocab d"] | jax.ShapeDtypeStruct, level: Level
) -> int:
    """How many of `rows` rows a call of `masked_logits` should take here.

    Arguments:
    - `chunks`: into how many parts the plan cuts logits, which counts only where logits exist.
    - `head`: the output matrix.
    - `level`: what the rows' measures and filters need.
    """
    call = default_call(target(), head, level)
    return -(-rows // chunks) if call is None else min(rows, call.most_rows)
