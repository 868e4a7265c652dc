"""The kernel of products of a few rows in Triton, for NVIDIA cards from Ampere on.

A program streams some outputs of a weight, or of both weights of a gated product, over a part of the inputs.
Weights are the left operand, of which the tensor cores take 64 outputs at a time, and the rows the right one,
of which they take as many as there are.
"""

import triton
import triton.language as tl

from jdllm.pallas.triton_gating import gated


@triton.jit
def multiply_rows(
    x,
    weight_0,
    weight_1,
    weight_2,
    layer,
    rows,
    out,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    N_0: tl.constexpr,
    N_1: tl.constexpr,
    N_2: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply the rows with `BLOCK_N` outputs of a weight, over one of `PARTS` parts of the inputs.

    `out` is `[parts, rows, outputs]`, of all weights one after the other; those that are not there have no
    outputs. Where `GATED`, the second weight has none of its own, and the inputs are whole.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    blocks_0, blocks_1 = tl.cdiv(N_0, BLOCK_N), tl.cdiv(N_1, BLOCK_N)
    weight, outputs, before = weight_0, N_0, 0
    if block >= blocks_0 + blocks_1:
        weight, outputs, before = weight_2, N_2, N_0 + N_1
        block -= blocks_0 + blocks_1
    elif block >= blocks_0:
        weight, outputs, before = weight_1, N_1, N_0
        block -= blocks_0
    column, row = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    inside = (column < outputs) | (N_0 % BLOCK_N + N_1 % BLOCK_N + N_2 % BLOCK_N == 0)
    at = (tl.load(layer).to(tl.int64) * outputs + block * BLOCK_N) * K
    product, up = _sums(
        x, weight + at, weight_1 + at, row < rows, inside, part, PARTS, K, GATED, BLOCK_R, BLOCK_N, BLOCK_K
    )
    if GATED:
        product = gated(product, up, out.dtype.element_ty)
    to = out + (part * rows + row)[None, :] * (N_0 + N_1 + N_2) + (before + column)[:, None]
    tl.store(to, product.to(out.dtype.element_ty), mask=inside[:, None] & (row < rows)[None, :])


@triton.jit
def _sums(
    x,
    weights,
    others,
    exist,
    inside,
    part,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """f32 products of weights and rows over a part of the inputs, and those of the others, 0 unless `BOTH`.

    Pointers are those of the first output; rows that do not `exist`, and outputs that are not `inside`, count
    as 0.
    """
    steps, depth = tl.cdiv(K, BLOCK_K), tl.arange(0, BLOCK_K)
    begin, end = part * steps // PARTS, (part + 1) * steps // PARTS
    x_at = begin * BLOCK_K + tl.arange(0, BLOCK_R)[:, None] * K + depth[None, :]
    w_at = begin * BLOCK_K + tl.arange(0, BLOCK_N)[:, None] * K + depth[None, :]
    product = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    other = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    # No address depends on what a step reads: the loop loads ahead, which is what counts here. Rows and
    # outputs that are not there are read as 0, and never stored.
    for step in range(begin, end):
        deep = (depth < K - step * BLOCK_K) | (K % BLOCK_K == 0)
        x_tile = tl.trans(tl.load(x + x_at, mask=exist[:, None] & deep[None, :], other=0.0))
        tile = tl.load(weights + w_at, mask=inside[:, None] & deep[None, :], other=0.0)
        product = tl.dot(tile, x_tile, product, input_precision="ieee")
        if BOTH:
            tile = tl.load(others + w_at, mask=inside[:, None] & deep[None, :], other=0.0)
            other = tl.dot(tile, x_tile, other, input_precision="ieee")
        x += BLOCK_K
        weights += BLOCK_K
        others += BLOCK_K
    return product, other
