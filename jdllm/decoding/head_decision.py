"""Masked logits for a head of one piece, and for one of which every card has a part of the ids."""

from jaxtyping import Array, Float, Int

from jdllm.models.leaf import VocabularyPart, logits
from jdllm.pallas.masked_logits import Level, RowDecision, RowSampling, masked_logits, rows_at_once
from jdllm.pallas.masked_logits.xla import decide_logits

Head = Float[Array, "vocab hidden"] | VocabularyPart

GATHERED_ROWS = 256
"""Rows whose logits exist at a time where cards gather them: of LLaDA 129 MB."""


def head_decision(
    hidden: Float[Array, "rows hidden"],
    head: Head,
    rows: RowSampling,
    level: Level,
    *,
    count: Int[Array, ""] | int | None = None,
) -> RowDecision:
    """`jdllm.pallas.masked_logits.masked_logits`; cards that have parts of the head gather their logits, and
    decide alike.

    Arguments:
    - `hidden`: normed hidden rows, a bounded chunk.
    - `head`: the output matrix.
    - `rows`: how each row is drawn.
    - `level`: static; at least what any row's measure and filters need.
    - `count`: rows from here on need not be computed, and their results mean nothing.
    """
    if isinstance(head, VocabularyPart):
        return decide_logits(logits(hidden, head), rows, level)
    return masked_logits(hidden, head, rows, level, count=count)


def head_rows_at_once(rows: int, chunks: int, head: Head, level: Level) -> int:
    """How many of `rows` rows a call of `head_decision` should take.

    Arguments:
    - `chunks`: into how many parts the plan cuts logits, which counts only where logits exist.
    - `head`: the output matrix.
    - `level`: what the rows' measures and filters need.
    """
    if isinstance(head, VocabularyPart):
        return min(-(-rows // chunks), GATHERED_ROWS)
    return rows_at_once(rows, chunks, head, level)
