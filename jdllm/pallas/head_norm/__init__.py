"""Queries and keys between their products and attention: norm of each head and rotation in one kernel."""

from jdllm.pallas.head_norm.api import check_head_norm, head_norm

__all__ = ["check_head_norm", "head_norm"]
