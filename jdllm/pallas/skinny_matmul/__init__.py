"""Products of a few rows with matrices of a layer."""

from jdllm.pallas.skinny_matmul.api import Implementation, skinny_matmul, skinny_parts

__all__ = ["Implementation", "skinny_matmul", "skinny_parts"]
