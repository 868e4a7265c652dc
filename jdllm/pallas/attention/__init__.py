"""Packed attention with per-row key ranges and softmax residuals."""

from jdllm.pallas.attention.api import AttentionOutput, attention, merge

__all__ = ["AttentionOutput", "attention", "merge"]
