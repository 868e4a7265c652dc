"""Which rows are multiplied together, and with which matrix: made on the device from the group sizes."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes
from jdllm.pallas.hopper import STRIP


class RowUnits(NamedTuple):
    """Runs of rows of one group each, `unit_rows` long; entries from `count` on are no units.

    - `matrix`: index of the group's matrix.
    - `row`: first row that is loaded, a multiple of 8; rows before `first` belong to other groups.
    - `first`, `last`: rows of the group, the second exclusive.
    - `count`: how many units there are.
    """

    matrix: Int32[Array, " units"]
    row: Int32[Array, " units"]
    first: Int32[Array, " units"]
    last: Int32[Array, " units"]
    count: Int32[Array, " 1"]


def row_units(group_sizes: GroupSizes, first_group: FirstGroup, rows: int, unit_rows: int) -> RowUnits:
    """Cut each group, from the multiple of 8 at or before its first row, into units of `unit_rows`.

    Arguments:
    - `group_sizes`, `first_group`: as of `jdllm.pallas.grouped_matmul.grouped_matmul`.
    - `rows`: of all groups together.
    """
    sizes = jnp.asarray(group_sizes, jnp.int32)
    groups = sizes.shape[0]
    last = jnp.cumsum(sizes)
    first = last - sizes
    start = first // STRIP * STRIP
    units = jnp.where(sizes > 0, -(-(last - start) // unit_rows), 0)
    end = jnp.cumsum(units)
    begin = end - units
    bound = (rows + min(groups, rows) * (unit_rows + STRIP - 2)) // unit_rows
    index = jnp.arange(bound, dtype=jnp.int32)[:, None]
    in_group = (begin <= index) & (index < end)
    matrix = jnp.arange(groups, dtype=jnp.int32) + jnp.asarray(first_group, jnp.int32)
    row = start + (index - begin) * unit_rows
    # Sums instead of a search and gathers: all of them are one kernel.
    fields = [jnp.where(in_group, field, 0).sum(axis=1) for field in (matrix, row, first, last)]
    return RowUnits(*fields, count=units.sum().reshape(1))
