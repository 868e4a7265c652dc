"""The kernel of products with matrices in few bits in Triton, for NVIDIA cards from Ampere on.

A program multiplies some outputs with some rows, over a part of the inputs. Weights are the left operand, and
are widened on their way to the tensor cores. The inputs of the rows are in the order in which weights are
stored, so that no weight is moved.
"""

import triton
import triton.language as tl


@triton.jit
def multiply_rows(
    x,
    weights,
    scales,
    offsets,
    layer,
    rows,
    out,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply `BLOCK_R` rows with `BLOCK_N` outputs, over one of `PARTS` parts of the inputs.

    With a `GROUP` of 0 weights are int8, and `scales` is `[layers, N]`. Otherwise a byte has two weights of 4
    bits, `GROUP` inputs share a scale, `scales` is `[layers, groups, N]`, and `x` is `[2, rows, K / 2]`: the
    inputs of the lower bits of all bytes, then those of the higher bits. Where `SHIFTED`, these inputs share
    an offset of `offsets`, too, and `BLOCK_K` is a multiple of `GROUP`. Otherwise `GROUP` is a multiple of
    `BLOCK_K`, and nobody reads `offsets`. `out` is `[PARTS, rows, N]`.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    part, steps = tl.program_id(2), K // BLOCK_K
    inside, exist, place = column < N, row < rows, tl.load(layer).to(tl.int64)
    begin, end = part * steps // PARTS, (part + 1) * steps // PARTS
    sums = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    if GROUP == 0:
        weights += place * N * K
        sums = add_bytes(sums, x, weights, row, column, exist, inside, begin, end, K, BLOCK_K)
        sums *= tl.load(scales + place * N + column, mask=inside, other=0.0)[:, None]
    else:
        weights += place * N * (K // 2)
        scales += place * (K // GROUP) * N
        offsets += place * (K // GROUP) * N
        sums = add_pairs(
            sums,
            x,
            weights,
            scales,
            offsets,
            row,
            column,
            exist,
            inside,
            begin,
            end,
            rows,
            K,
            N,
            GROUP,
            SHIFTED,
            BLOCK_K,
        )
    to = out + (part * rows + row)[None, :] * N + column[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside[:, None] & exist[None, :])


@triton.jit
def add_bytes(
    sums, x, weights, row, column, exist, inside, begin, end, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Products of weights of 8 bits, a part of whose steps is from `begin` to `end`."""
    depth = begin * BLOCK_K + tl.arange(0, BLOCK_K)
    x_at, w_at = x + row[:, None] * K + depth[None, :], weights + column[:, None] * K + depth[None, :]
    for _ in range(begin, end):
        own = tl.load(x_at, mask=exist[:, None], other=0.0)
        tile = tl.load(w_at, mask=inside[:, None], other=0).to(tl.float32).to(own.dtype)
        sums = tl.dot(tile, tl.trans(own), sums, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K
    return sums


@triton.jit
def add_pairs(
    sums,
    x,
    weights,
    scales,
    offsets,
    row,
    column,
    exist,
    inside,
    begin,
    end,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Scaled products of weights of 4 bits, a part of whose steps is from `begin` to `end`."""
    half: tl.constexpr = K // 2
    depth = begin * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    low_at = x + row[:, None] * half + depth[None, :]
    w_at = weights + column[:, None] * half + depth[None, :]
    for step in range(begin, end):
        low = tl.load(low_at, mask=exist[:, None], other=0.0)
        high = tl.load(low_at + rows * half, mask=exist[:, None], other=0.0)
        pairs = tl.load(w_at, mask=inside[:, None], other=0)
        first, second = (pairs & 15).to(tl.float32) - 8, (pairs >> 4).to(tl.float32) - 8
        if SHIFTED:
            scale = _of_groups(scales, step, column, inside, N, GROUP, BLOCK_K)
            offset = _of_groups(offsets, step, column, inside, N, GROUP, BLOCK_K)
            first, second = first * scale + offset, second * scale + offset
            sums = tl.dot(first.to(low.dtype), tl.trans(low), sums, input_precision="ieee")
            sums = tl.dot(second.to(low.dtype), tl.trans(high), sums, input_precision="ieee")
        else:
            product = tl.dot(first.to(low.dtype), tl.trans(low), input_precision="ieee")
            product = tl.dot(second.to(low.dtype), tl.trans(high), product, input_precision="ieee")
            scale = tl.load(scales + step * BLOCK_K // GROUP * N + column, mask=inside, other=0.0)
            sums += scale[:, None] * product
        low_at += BLOCK_K // 2
        w_at += BLOCK_K // 2
    return sums


@triton.jit
def _of_groups(numbers, step, column, inside, N: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of each byte of a step the number of its group, in f32."""
    groups: tl.constexpr = BLOCK_K // GROUP
    group = step * groups + tl.arange(0, groups)
    found = tl.load(numbers + group[None, :] * N + column[:, None], mask=inside[:, None], other=0.0)
    wide = tl.broadcast_to(found.to(tl.float32)[:, :, None], column.shape[0], groups, GROUP // 2)
    return tl.reshape(wide, column.shape[0], BLOCK_K // 2)
