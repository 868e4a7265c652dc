"""The head for rows that are still masked: a decision per row instead of its logits."""

from jdllm.pallas.listed import LISTED
from jdllm.pallas.masked_logits.api import masked_logits, rows_at_once
from jdllm.pallas.masked_logits.types import (
    ANY,
    Level,
    Likeliest,
    RowControl,
    RowDecision,
    RowLowered,
    RowPenalty,
    RowSampling,
)

__all__ = [
    "ANY",
    "LISTED",
    "Level",
    "Likeliest",
    "RowControl",
    "RowDecision",
    "RowLowered",
    "RowPenalty",
    "RowSampling",
    "masked_logits",
    "rows_at_once",
]
