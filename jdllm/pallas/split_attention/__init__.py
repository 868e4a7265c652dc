"""Split-S attention: queries of a block over cached keys in pages, scattered or not, and over fresh ones."""

from jdllm.pallas.split_attention.api import split_attention
from jdllm.pallas.split_attention.types import (
    FRESH_UNIT,
    PageTable,
    dense_table,
    fresh_unit_of,
    with_fresh_rows,
)

__all__ = ["FRESH_UNIT", "PageTable", "dense_table", "fresh_unit_of", "split_attention", "with_fresh_rows"]
