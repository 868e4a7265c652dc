"""Products of rows, sorted by group, with the matrix of their group."""

from jdllm.pallas.grouped_matmul.api import Implementation, grouped_matmul

__all__ = ["Implementation", "grouped_matmul"]
