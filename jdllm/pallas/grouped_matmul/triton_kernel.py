"""The kernel of grouped products in Triton, for NVIDIA cards from Ampere on.

A program multiplies the rows of a unit with some columns of its matrix, or of both matrices of a gated
product. Programs that start one after the other have the same columns of `TOGETHER` units, then their next
columns: units of one group share tiles of its matrix in L2, and all columns share the rows.
"""

import triton
import triton.language as tl

from jdllm.pallas.triton_gating import gated


@triton.jit
def multiply_units(
    x,
    gates,
    weights,
    matrix,
    row,
    first,
    last,
    ends,
    out,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply the rows of a unit with `BLOCK_N` columns, if there is that unit.

    Pointers from `matrix` to `ends` are those of `RowUnits`, made for `BLOCK_R` rows.
    """
    program, together = tl.program_id(0), TOGETHER * tl.cdiv(N, BLOCK_N)
    unit = program // together * TOGETHER + program % TOGETHER
    column = program % together // TOGETHER * BLOCK_N
    if unit < tl.load(ends + GROUPS - 1):
        first_row = tl.load(row + unit)
        line = first_row + tl.arange(0, BLOCK_R)
        own = (line >= tl.load(first + unit)) & (line < tl.load(last + unit))
        inside = (column + tl.arange(0, BLOCK_N) < N) | (N % BLOCK_N == 0)
        at = tl.load(matrix + unit).to(tl.int64) * (K * N) + column
        x_rows = x + first_row.to(tl.int64) * K
        gate, product = _sums(
            x_rows, gates + at, weights + at, own, inside, K, N, GATED, BLOCK_R, BLOCK_N, BLOCK_K
        )
        if GATED:
            product = gated(gate, product, out.dtype.element_ty)
        to = out + first_row.to(tl.int64) * N + column
        to += tl.arange(0, BLOCK_R)[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(to, product.to(out.dtype.element_ty), mask=own[:, None] & inside[None, :])


@triton.jit
def _sums(
    x,
    gates,
    weights,
    own,
    inside,
    K: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """f32 products of rows with the gates, 0 unless `GATED`, and with the weights.

    Pointers are those of the first row and column; rows that are not `own`, and columns that are not
    `inside`, count as 0.
    """
    depth = tl.arange(0, BLOCK_K)
    x_at = tl.arange(0, BLOCK_R)[:, None] * K + depth[None, :]
    w_at = depth[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
    gate = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    product = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    # Rows are read once for both matrices. Sums of all rows add tiles of the inputs in one order, and rows of
    # other units are read as 0: a row's bits depend on the row and its matrices only.
    for k in range(0, K, BLOCK_K):
        deep = (depth < K - k) | (K % BLOCK_K == 0)
        exists = deep[:, None] & inside[None, :]
        x_tile = tl.load(x + x_at, mask=own[:, None] & deep[None, :], other=0.0)
        if GATED:
            gate_tile = tl.load(gates + w_at, mask=exists, other=0.0)
            gate = tl.dot(x_tile, gate_tile, gate, input_precision="ieee")
        tile = tl.load(weights + w_at, mask=exists, other=0.0)
        product = tl.dot(x_tile, tile, product, input_precision="ieee")
        x += BLOCK_K
        gates += BLOCK_K * N
        weights += BLOCK_K * N
    return gate, product
