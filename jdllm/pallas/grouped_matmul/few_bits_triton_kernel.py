"""The kernel of grouped products with matrices in few bits in Triton, for NVIDIA cards from Ampere on.

Programs are those of `jdllm.pallas.grouped_matmul.triton_kernel`, and sums those of
`jdllm.pallas.quantised_matmul.triton_kernel`. The inputs of the rows are in the order in which weights are
stored.
"""

import triton
import triton.language as tl

from jdllm.pallas.quantised_matmul.triton_kernel import add_bytes, add_pairs
from jdllm.pallas.triton_gating import gated


@triton.jit
def multiply_few_bits_units(
    x,
    gates,
    gate_scales,
    weights,
    scales,
    matrix,
    row,
    first,
    last,
    ends,
    rows,
    out,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply the rows of a unit with `BLOCK_N` outputs, if there is that unit.

    Pointers from `matrix` to `ends` are those of `RowUnits`, made for `BLOCK_R` rows. With a `GROUP` of 0
    weights are int8. Otherwise a byte has two weights of 4 bits, and `x` is `[2, rows, K / 2]`.
    """
    program, together = tl.program_id(0), TOGETHER * tl.cdiv(N, BLOCK_N)
    unit = program // together * TOGETHER + program % TOGETHER
    column = program % together // TOGETHER * BLOCK_N + tl.arange(0, BLOCK_N)
    if unit < tl.load(ends + GROUPS - 1):
        first_row, line = tl.load(row + unit), tl.arange(0, BLOCK_R)
        own = (first_row + line >= tl.load(first + unit)) & (first_row + line < tl.load(last + unit))
        first_row, place = first_row.to(tl.int64), tl.load(matrix + unit).to(tl.int64)
        x += first_row * (K if GROUP == 0 else K // 2)
        product = _sums(
            x, weights, scales, place, line, column, own, rows, K, N, GROUP, BLOCK_R, BLOCK_N, BLOCK_K
        )
        if GATED:
            gate = _sums(
                x, gates, gate_scales, place, line, column, own, rows, K, N, GROUP, BLOCK_R, BLOCK_N, BLOCK_K
            )
            product = gated(gate, product, out.dtype.element_ty)
        to = out + (first_row + line)[None, :] * N + column[:, None]
        tl.store(to, product.to(out.dtype.element_ty), mask=own[None, :] & (column < N)[:, None])


@triton.jit
def _sums(
    x,
    weights,
    scales,
    place,
    line,
    column,
    own,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Scaled f32 products of outputs of the matrix at `place` with lines of `x`.

    Lines that are not `own`, and columns that are not there, count as 0.
    """
    sums, inside, end = tl.zeros([BLOCK_N, BLOCK_R], tl.float32), column < N, K // BLOCK_K
    if GROUP == 0:
        weights += place * N * K
        sums = add_bytes(sums, x, weights, line, column, own, inside, 0, end, K, BLOCK_K)
        sums *= tl.load(scales + place * N + column, mask=inside, other=0.0)[:, None]
    else:
        weights += place * N * (K // 2)
        scales += place * (K // GROUP) * N
        number = tl.cast(rows, tl.int64)
        sums = add_pairs(
            sums,
            x,
            weights,
            scales,
            scales,
            line,
            column,
            own,
            inside,
            0,
            end,
            number,
            K,
            N,
            GROUP,
            False,
            BLOCK_K,
        )
    return sums
