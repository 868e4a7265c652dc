"""Row by row, what lies between the products of a few rows."""

from jdllm.pallas.rowwise.api import add_norm, check_rowwise, rotate_rows

__all__ = ["add_norm", "check_rowwise", "rotate_rows"]
