"""The head for rows that are still masked: a decision per row instead of its logits."""

from jdllm.pallas.masked_logits.xla import RowDecision, TokenNoise, masked_logits

__all__ = ["RowDecision", "TokenNoise", "masked_logits"]
