"""The kernel of packed attention in Triton, for NVIDIA cards from Ampere on.

A program takes some rows of one head. Which keys it visits, and which of them need no mask, follows from the
lowest and highest bounds of its rows. Softmax is to the base 2, whose logarithm `SCALE` has in it.
"""

import triton
import triton.language as tl

from jdllm.pallas.triton_softmax import weights


@triton.jit
def attend(
    q,
    k,
    v,
    k_start,
    k_end,
    rows,
    keys,
    o,
    m,
    l,  # noqa: E741
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Attention of `BLOCK_Q` rows of a head: `o`, `m` and `l` are `AttentionOutput`.

    `BLOCK_D` holds `HEAD_DIM`, of which `DEPTH` numbers at a time are multiplied for the scores.
    """
    # Under causal ranges the last rows have the most to do: they begin first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head = tl.program_id(1)
    row = first_row + tl.arange(0, BLOCK_Q)
    exists = row < rows
    start = tl.maximum(tl.load(k_start + row, mask=exists, other=0), 0)
    end = tl.minimum(tl.load(k_end + row, mask=exists, other=0), keys)
    sees = start < end
    first = tl.min(tl.where(sees, start, keys))
    last = tl.max(tl.where(sees, end, 0))
    # Rows that see nothing ask for no mask: what is computed for them is never stored.
    start, end = tl.where(sees, start, 0), tl.where(sees, end, keys)
    blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK_K)
    whole_begin = tl.minimum(tl.cdiv(tl.maximum(tl.max(start) - first, 0), BLOCK_K), blocks)
    whole_end = tl.maximum((tl.min(end) - first) // BLOCK_K, whole_begin)

    at = (first_row.to(tl.int64) * HEADS + head) * HEAD_DIM
    q_head = q + at
    q_tile = _rows(q_head, 0, exists, HEADS, HEAD_DIM, BLOCK_Q, DEPTH, False)
    kv_head = head // (HEADS // KV_HEADS) * HEAD_DIM
    k_head, v_head = k + kv_head, v + kv_head
    out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    most = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    # Blocks at both ends are masked, those between are not: two loops without a branch, which load ahead. A
    # row may see nothing of a masked block, and weighs it 0; in the second loop each row sees all.
    for masked in range(0, blocks - (whole_end - whole_begin)):
        block = masked + tl.where(masked < whole_begin, 0, whole_end - whole_begin)
        out, most, total = _visit(
            out, most, total, q_tile, q_head, exists, k_head, v_head, first + block * BLOCK_K, start, end,
            last, HEADS, KV_HEADS, HEAD_DIM, SCALE, BLOCK_Q, BLOCK_K, BLOCK_D, DEPTH, False,
        )  # fmt: skip
    for block in range(whole_begin, whole_end):
        out, most, total = _visit(
            out, most, total, q_tile, q_head, exists, k_head, v_head, first + block * BLOCK_K, start, end,
            last, HEADS, KV_HEADS, HEAD_DIM, SCALE, BLOCK_Q, BLOCK_K, BLOCK_D, DEPTH, True,
        )  # fmt: skip

    out = tl.where(sees[:, None], out / tl.where(sees, total, 1.0)[:, None], 0.0)
    column = tl.arange(0, BLOCK_D)[None, :]
    to = o + at + tl.arange(0, BLOCK_Q)[:, None] * (HEADS * HEAD_DIM) + column
    tl.store(to, out.to(o.dtype.element_ty), mask=exists[:, None] & (column < HEAD_DIM))
    residual = row.to(tl.int64) * HEADS + head
    log_2 = 0.6931471805599453
    tl.store(m + residual, tl.where(sees, most * log_2, float("-inf")), mask=exists)
    tl.store(l + residual, tl.where(sees, total, 0.0), mask=exists)


@triton.jit
def _visit(
    out,
    most,
    total,
    q_tile,
    q_head,
    exists,
    k_head,
    v_head,
    key,
    start,
    end,
    last,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Take in the block of keys from `key` on; where `WHOLE`, every row sees all of them."""
    column = key + tl.arange(0, BLOCK_K)
    seen = column < last
    at = key.to(tl.int64) * (KV_HEADS * HEAD_DIM)
    k_tile = _rows(k_head + at, 0, seen, KV_HEADS, HEAD_DIM, BLOCK_K, DEPTH, WHOLE)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    for deep in range(DEPTH, HEAD_DIM, DEPTH):
        q_part = _rows(q_head, deep, exists, HEADS, HEAD_DIM, BLOCK_Q, DEPTH, False)
        k_part = _rows(k_head + at, deep, seen, KV_HEADS, HEAD_DIM, BLOCK_K, DEPTH, WHOLE)
        scores = tl.dot(q_part, tl.trans(k_part), scores, input_precision="ieee")
    if not WHOLE:
        visible = (column[None, :] >= start[:, None]) & (column[None, :] < end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    p, decay, most = weights(scores, most, SCALE, WHOLE)
    v_tile = _rows(v_head + at, 0, seen, KV_HEADS, HEAD_DIM, BLOCK_K, BLOCK_D, WHOLE)
    out = tl.dot(p.to(v_tile.dtype), v_tile, out * decay[:, None], input_precision="ieee")
    return out, most, total * decay + tl.sum(p, 1)


@triton.jit
def _rows(
    source,
    deep,
    exist,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """`DEPTH` numbers of a head, from `deep` on, of `BLOCK` rows from `source` on.

    0 where rows do not `exist`, which all do where `WHOLE`.
    """
    column = deep + tl.arange(0, DEPTH)[None, :]
    at = source + tl.arange(0, BLOCK)[:, None] * (HEADS * HEAD_DIM) + column
    if WHOLE and HEAD_DIM % DEPTH == 0:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=exist[:, None] & (column < HEAD_DIM), other=0.0)
    return tile
