"""Products of many rows with matrices in few bits."""

from jdllm.pallas.quantised_matmul.api import Implementation, quantised_matmul

__all__ = ["Implementation", "quantised_matmul"]
