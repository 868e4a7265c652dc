"""Split-S attention: queries of a block over cached keys that lie in pages, scattered or not."""

from jdllm.pallas.split_attention.api import split_attention
from jdllm.pallas.split_attention.types import PageTable, dense_table

__all__ = ["PageTable", "dense_table", "split_attention"]
