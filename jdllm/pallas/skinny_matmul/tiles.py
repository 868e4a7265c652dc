"""How products of a few rows are cut for the Hopper kernel."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.pallas.hopper import (
    PROCESSORS,
    SHARED_BYTES,
    SWIZZLE,
    WARPGROUP_ROWS,
)
from jdllm.quantised import SHIFTED_GROUP

Scalar = Int[Array, ""]

WIDE = 16
"""Bits of a weight that is not quantised, and of a number of the rows."""

DEPTH = SWIZZLE * 8 // WIDE
"""Inputs per pipeline stage of weights that are not quantised."""

NARROW = 4
"""Bits of a weight of a matrix with scales of groups (`jdllm.quantised.Grouped` and `Shifted`)."""


def depth_of(bits: int) -> int:
    """Inputs per pipeline stage of weights of so many bits each. Those of 4 bits are a group, or four groups
    that have offsets."""
    return SWIZZLE * 8 // max(bits, 8)


MAX_ROWS = 64
"""Every block reads all rows beside its columns, and of more it would read more than of these."""

COLUMN_UNIT = 16
"""Columns of a tile are multiples of it: results leave in strips of so many, whole sectors of memory."""


def column_unit(bits: int, rotated: bool = False) -> int:
    """The same of weights of so many bits.

    Scales of groups are copied in whole 128 bytes; with offsets, two warps read those of 32 columns side by
    side. Where products are rotated, a tile has both numbers of each pair, which are two runs of columns.
    """
    return COLUMN_UNIT * (2 if bits == NARROW else 1) * (2 if rotated else 1)


MAX_COLUMNS = 256
"""Columns of the widest copy."""

MAX_ACCUMULATED = 320
"""Columns, of both weights of a gated product, whose sums a warpgroup can hold."""

MAX_QUANTISED = 4 * WARPGROUP_ROWS
"""The same of quantised weights: each warpgroup takes 64 columns, and more than four would have too few
registers."""

SUMS_PADDING = 4
"""Numbers between the sums of two columns in shared memory: they are written one way and read the other."""

MAX_STAGES = 32
"""A group of barriers has no more."""

MAX_SPLITS = 8

# Angles of more rows leave too few registers for warpgroups that take turns.
_FEW_ANGLES = 32

# What a byte of partial sums costs, in bytes of weights: it is written, then read by another kernel, while
# nothing streams.
_PARTIAL_COST = 12


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The cut of one launch: each block takes some columns of a weight, or of both of a gated product, and a
    part of the inputs.

    - `columns`: outputs of a block, a multiple of `column_unit`.
    - `splits`: parts of the inputs; with more than one, partial sums leave the kernel.
    - `stages`: tiles of all operands in flight.
    - `bits`: of a weight.
    - `turns`: warpgroups that take turns at the steps, each with the same columns.
    - `shifted`: whether groups of inputs have offsets.

    Raises `NotImplementedError` for cuts outside of the kernel's limits.
    """

    columns: int
    splits: int
    stages: int
    bits: int = WIDE
    turns: int = 1
    shifted: bool = False

    def __post_init__(self):
        unit = column_unit(self.bits)
        if not 0 < self.columns <= MAX_COLUMNS or self.columns % unit:
            raise NotImplementedError(
                f"a block has a multiple of {unit} columns, at most {MAX_COLUMNS}, not {self.columns}"
            )
        if not 1 <= self.splits <= MAX_SPLITS:
            raise NotImplementedError(f"inputs are split into 1 to {MAX_SPLITS} parts, not {self.splits}")
        if not 1 <= self.stages <= MAX_STAGES:
            raise NotImplementedError(f"a ring has 1 to {MAX_STAGES} stages, not {self.stages}")
        if self.stages % self.turns:  # a barrier counts what one warpgroup waits for
            raise NotImplementedError(f"{self.turns} turns cannot share {self.stages} stages")

    @property
    def quantised(self) -> bool:
        """Whether weights are widened before they are multiplied."""
        return self.bits < WIDE

    @property
    def grouped(self) -> bool:
        """Whether each stage has scales of its own."""
        return self.bits == NARROW

    @property
    def depth(self) -> int:
        """Inputs of a stage."""
        return depth_of(self.bits)

    def consumers(self, gated: bool) -> int:
        """Warpgroups of a block that multiply: one, or of quantised weights one for 64 columns, in turns."""
        if not self.quantised:
            return 1
        return self.turns * product_columns(summed_columns(self.columns, gated)) // WARPGROUP_ROWS

    def first_step(self, split: Scalar, steps: int) -> Scalar:
        """Where part `split` of `steps` steps begins; parts differ by one step at most."""
        return lax.div(split * steps, jnp.int32(self.splits))

    def shared_bytes(self, rows: int, gated: bool) -> int:
        """Shared memory of a block: its sums take the place of the ring."""
        ring = self.stages * _stage_bytes(rows, self.columns, gated, self.bits, self.shifted)
        ring += _unloaded_bytes(self.columns, gated, self.bits)
        sums = self.turns * product_columns(summed_columns(self.columns, gated))
        return max(ring, sums * (rows + SUMS_PADDING) * 4)

    def check(
        self,
        rows: int,
        outputs: Sequence[int],
        k: int,
        *,
        gated: bool = False,
        biased: bool = False,
        head_dim: int | None = None,
    ) -> None:
        """Raise `NotImplementedError`, naming the limit, where a block cannot take this cut.

        Arguments:
        - `rows`, `outputs`, `k`: rows of the operand, outputs of each weight, and inputs.
        - `gated`, `biased`: whether the result is a gated product, and whether something is added.
        - `head_dim`: of products that are rotated.
        """
        whole = "gated" if gated else "rotated" if head_dim else "biased" if biased else None
        if whole and self.splits > 1:
            raise NotImplementedError(f"a {whole} product takes its inputs whole, not in {self.splits} parts")
        unit = column_unit(self.bits, rotated=True)
        if head_dim and (self.columns % unit or head_dim % self.columns):
            raise NotImplementedError(
                f"a block of rotated products has a multiple of {unit} columns that divides the "
                f"{head_dim} of a head, not {self.columns}"
            )
        if biased and any(n % self.columns for n in outputs):
            raise NotImplementedError(
                f"the columns of a biased product's block divide its outputs: {self.columns} not {outputs}"
            )
        if self.splits * self.depth > k:
            raise NotImplementedError(f"{k} inputs do not make {self.splits} parts of {self.depth} or more")
        most = MAX_QUANTISED // self.turns if self.quantised else MAX_ACCUMULATED
        if summed_columns(self.columns, gated) > most:
            raise NotImplementedError(
                f"a block sums at most {most} columns, not {self.columns} of both weights"
            )
        if self.shared_bytes(rows, gated) > SHARED_BYTES:
            raise NotImplementedError(
                f"{self.stages} stages need {self.shared_bytes(rows, gated)} bytes, more than the "
                f"{SHARED_BYTES} of shared memory"
            )


def default_tiles(
    rows: int,
    outputs: Sequence[int],
    k: int,
    *,
    gated: bool = False,
    biased: bool = False,
    head_dim: int | None = None,
    bits: int = WIDE,
    shifted: bool = False,
) -> Tiles:
    """The cut that gives the busiest processor the least to move, with as many stages as there is room for.

    Arguments:
    - `rows`: of the operand, a multiple of 8, at most `MAX_ROWS`.
    - `outputs`: of each weight, multiples of `column_unit`.
    - `k`: inputs, a multiple of those of a stage.
    - `gated`: whether the result is a gated product of two weights.
    - `biased`: whether something is added to the products.
    - `head_dim`: of products that are rotated, whose heads are whole numbers of blocks.
    - `bits`: of a weight.
    - `shifted`: whether groups of inputs have offsets.
    """
    whole = gated or biased or head_dim or len(outputs) > 1
    most_splits = 1 if whole else min(MAX_SPLITS, k // depth_of(bits))
    most_summed = MAX_ACCUMULATED if bits == WIDE else MAX_QUANTISED
    most_columns = min(MAX_COLUMNS, most_summed // summed_columns(1, gated), max(outputs))
    unit = column_unit(bits, rotated=head_dim is not None)
    cuts = [
        (splits, columns)
        for splits in range(1, most_splits + 1)
        for columns in range(unit, most_columns + 1, unit)
        if (head_dim is None or head_dim % columns == 0)
        and (not biased or all(n % columns == 0 for n in outputs))
    ]
    splits, columns = min(cuts, key=lambda cut: (_moved(rows, outputs, k, gated, bits, shifted, *cut), cut))
    room = SHARED_BYTES - _unloaded_bytes(columns, gated, bits)
    stages = min(room // _stage_bytes(rows, columns, gated, bits, shifted), MAX_STAGES)
    crowded = head_dim is not None and rows > _FEW_ANGLES
    turns = 1 if crowded else most_turns(columns, gated, bits)
    return Tiles(columns, splits, stages // turns * turns, bits, turns, shifted)


def blocks_of(outputs: Sequence[int], columns: int, gated: bool) -> list[int]:
    """How many blocks each weight takes; those of a gated product share all."""
    blocks = [-(-n // columns) for n in outputs]
    return blocks[:1] if gated else blocks


def summed_columns(columns: int, gated: bool) -> int:
    """How many columns a block sums whose outputs are so many."""
    return columns * (2 if gated else 1)


def most_turns(columns: int, gated: bool, bits: int) -> int:
    """How many warpgroups may take turns at the steps of so many columns; 0 for too many columns."""
    return 1 if bits == WIDE else MAX_QUANTISED // product_columns(summed_columns(columns, gated))


def product_columns(summed: int) -> int:
    """How many columns a product has that sums so many."""
    return -(-summed // WARPGROUP_ROWS) * WARPGROUP_ROWS


def _moved(
    rows: int,
    outputs: Sequence[int],
    k: int,
    gated: bool,
    bits: int,
    shifted: bool,
    splits: int,
    columns: int,
) -> int:
    """Bytes that the busiest processor moves, partial sums at their cost."""
    waves = -(-sum(blocks_of(outputs, columns, gated)) * splits // PROCESSORS)
    steps = -(-k // (depth_of(bits) * splits))
    streamed = _row_bytes(bits) * rows + _column_bytes(bits, shifted) * summed_columns(columns, gated)
    partials = 4 * rows * columns if splits > 1 else 0
    return waves * (streamed * steps + _PARTIAL_COST * partials)


def stage_columns(columns: int, gated: bool, bits: int) -> int:
    """How many columns a stage has room for.

    A product that reads shared memory may read beyond the columns of a stage, into the next stage. Quantised
    weights are read one stage at a time.
    """
    summed = summed_columns(columns, gated)
    return summed if bits == WIDE else product_columns(summed)


def _row_bytes(bits: int) -> int:
    """Of a row in a stage of weights of so many bits."""
    return depth_of(bits) * WIDE // 8


def _column_bytes(bits: int, shifted: bool) -> int:
    """Of a column of weights in a stage, its scales and offsets included."""
    scales = 4 * depth_of(bits) // SHIFTED_GROUP if shifted else 4 if bits == NARROW else 0
    return depth_of(bits) * bits // 8 + scales


def _stage_bytes(rows: int, columns: int, gated: bool, bits: int, shifted: bool) -> int:
    return _row_bytes(bits) * rows + _column_bytes(bits, shifted) * stage_columns(columns, gated, bits)


def _unloaded_bytes(columns: int, gated: bool, bits: int) -> int:
    """What the last stage's product reads beyond its columns."""
    product = product_columns(summed_columns(columns, gated))
    return (product - stage_columns(columns, gated, bits)) * SWIZZLE
