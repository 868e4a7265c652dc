"""Attention of rows that see two ranges of packed rows apart."""

from typing import NamedTuple

from jdllm.execution.transformer import attention_over
from jdllm.models.block import RowInts, Rows
from jdllm.models.layer import AttentionFn, Heads
from jdllm.pallas.attention import AttentionOutput, merge


class FurtherKeys(NamedTuple):
    """A second range [k_start, k_end) of rows whose keys each row sees; it may be empty."""

    k_start: RowInts
    k_end: RowInts


def seeing_both(rows: Rows, further: FurtherKeys) -> AttentionFn:
    """Attention over the keys of both ranges of each row, with the contract of
    `jdllm.pallas.attention.attention`; exact up to rounding.

    Arguments:
    - `rows`: with the first range of each row.
    - `further`: the second range of each row, which has no key of the first.
    """
    keys = rows.k_start.shape[0]
    first, second = (attention_over(one, keys) for one in (rows, rows._replace(**further._asdict())))

    def attend(
        q: Heads, k: Heads, v: Heads, k_start: RowInts, k_end: RowInts, *, scale: float
    ) -> AttentionOutput:
        parts = [first(q, k, v, k_start, k_end, scale=scale), second(q, k, v, *further, scale=scale)]
        return merge([AttentionOutput(*part) for part in parts])

    return attend
