"""The residual stream between two products of a few rows: addition and norm in one kernel."""

from jdllm.pallas.add_norm.api import add_norm, check_add_norm

__all__ = ["add_norm", "check_add_norm"]
