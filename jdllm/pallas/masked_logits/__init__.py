"""The head for rows that are still masked: a decision per row instead of its logits."""

from jdllm.pallas.masked_logits.types import Level, RowDecision, RowSampling
from jdllm.pallas.masked_logits.xla import masked_logits

__all__ = ["Level", "RowDecision", "RowSampling", "masked_logits"]
