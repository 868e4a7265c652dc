"""Which rows are multiplied together, and with which matrix: made on the device from the group sizes."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int32

from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes
from jdllm.pallas.hopper import STRIP

Scalar = Int[Array, ""]


class Unit(NamedTuple):
    """One entry of `RowUnits`."""

    matrix: Scalar
    row: Scalar
    first: Scalar
    last: Scalar


class RowUnits(NamedTuple):
    """Runs of rows of one group each, `unit_rows` long; entries beyond the last group's are no units.

    - `matrix`: index of the group's matrix.
    - `row`: first row that is loaded, a multiple of 8; rows before `first` belong to other groups.
    - `first`, `last`: rows of the group, the second exclusive.
    - `ends`: how many units there are up to the end of each group.
    """

    matrix: Int32[Array, " units"]
    row: Int32[Array, " units"]
    first: Int32[Array, " units"]
    last: Int32[Array, " units"]
    ends: Int32[Array, " groups"]

    def at(self, index: Scalar) -> Unit:
        """One of them."""
        return Unit(*(field[index] for field in self[: len(Unit._fields)]))


def row_units(group_sizes: GroupSizes, first_group: FirstGroup, rows: int, unit_rows: int) -> RowUnits:
    """Cut each group, from the multiple of 8 at or before its first row, into units of `unit_rows`.

    Arguments:
    - `group_sizes`: rows in each group; a group may be empty.
    - `first_group`: the matrix of the first group.
    - `rows`: of all groups together.
    """
    sizes = jnp.asarray(group_sizes, jnp.int32)
    groups = sizes.shape[0]
    last = _sums(sizes)
    first = last - sizes
    start = first & -STRIP
    units = jnp.where(sizes > 0, lax.div(last - start + (unit_rows - 1), jnp.int32(unit_rows)), 0)
    ends = _sums(units)
    begin = ends - units
    bound = (rows + min(groups, rows) * (unit_rows + STRIP - 2)) // unit_rows
    index = jnp.arange(bound, dtype=jnp.int32)[:, None]
    in_group = (begin <= index) & (index < ends)
    matrix = jnp.arange(groups, dtype=jnp.int32) + jnp.asarray(first_group, jnp.int32)
    row = start + (index - begin) * unit_rows
    # Sums instead of a search and gathers: all of them are one kernel.
    fields = [jnp.where(in_group, field, 0).sum(axis=1) for field in (matrix, row, first, last)]
    return RowUnits(*fields, ends=ends)


def _sums(values: Int32[Array, " groups"]) -> Int32[Array, " groups"]:
    """Running sums: one kernel, where `cumsum` takes two."""
    group = jnp.arange(len(values))
    return jnp.where(group <= group[:, None], values, 0).sum(axis=1)
