"""Packed attention with per-row key ranges and softmax residuals."""

from jdllm.pallas.attention.api import AttentionOutput, attention, merge, nothing_seen

__all__ = ["AttentionOutput", "attention", "merge", "nothing_seen"]
