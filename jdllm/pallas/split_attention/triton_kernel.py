"""The kernel of Split-S attention in Triton, for NVIDIA cards from Ampere on.

A program takes some rows of a request that share a key-value head, over a part of the request's entries:
those of a request are cut evenly. Softmax is to the base 2, whose logarithm `SCALE` has in it.
"""

import triton
import triton.language as tl

from jdllm.pallas.triton_softmax import weights


@triton.jit
def attend(
    q,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    k_fresh,
    v_fresh,
    pages,
    valid,
    first,
    layer,
    pool_pages,
    o,
    m,
    l,  # noqa: E741
    PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FRESH_UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Attention over one of `PARTS` parts: `o`, `m` and `l` are `AttentionOutput` of each part.

    `FRESH_UNIT` is 0 where there are no fresh rows. `SCALED` says that the pool has numbers of 8 bits, and a
    scale for each head of each row. `BLOCK_D` holds `HEAD_DIM`, of which `DEPTH` numbers at a time are
    multiplied for the scores.
    """
    part, row_block = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    kv_head, request = tl.program_id(1), tl.program_id(2)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < QUERIES * GROUP
    heads = KV_HEADS * GROUP
    place = (request * QUERIES + row // GROUP) * heads + kv_head * GROUP + row % GROUP
    q_rows = q + place.to(tl.int64) * HEAD_DIM
    q_tile = _part(q_rows, 0, exists, HEAD_DIM, DEPTH)

    begin, end = tl.load(first + request), tl.load(first + request + 1)
    size = tl.cdiv(end - begin, PARTS)
    begin = tl.minimum(begin + part * size, end)
    end = tl.minimum(begin + size, end)
    out = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    most = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    of_layer = tl.load(layer).to(tl.int64) * pool_pages
    BLOCKS: tl.constexpr = PAGE_ROWS // BLOCK_K
    for index in range(0, (end - begin) * BLOCKS):
        entry, skipped = begin + index // BLOCKS, index % BLOCKS * BLOCK_K
        page = tl.load(pages + entry)
        # Fresh rows come in the loop below: without a branch this one loads ahead. Here none of them is live,
        # and what is not live weighs nothing.
        live = tl.where(page < 0, 0, tl.load(valid + entry)) - skipped
        start = ((of_layer + tl.maximum(page, 0)) * KV_HEADS + kv_head) * PAGE_ROWS + skipped
        out, most, total = _visit(
            out, most, total, q_tile, q_rows, exists,
            k_pool + start * HEAD_DIM, v_pool + start * HEAD_DIM, k_scales + start, v_scales + start, live,
            HEAD_DIM, HEAD_DIM, SCALED, SCALE, BLOCK_K, BLOCK_D, DEPTH,
        )  # fmt: skip
    if FRESH_UNIT > 0:
        for index in range(0, (end - begin) * BLOCKS):
            entry, skipped = begin + index // BLOCKS, index % BLOCKS * BLOCK_K
            page = tl.load(pages + entry)
            live = tl.load(valid + entry) - skipped
            if (page < 0) & (live > 0):
                start = ((-page - 1).to(tl.int64) * FRESH_UNIT + skipped) * KV_HEADS + kv_head
                out, most, total = _visit(
                    out, most, total, q_tile, q_rows, exists,
                    k_fresh + start * HEAD_DIM, v_fresh + start * HEAD_DIM, k_scales, v_scales, live,
                    KV_HEADS * HEAD_DIM, HEAD_DIM, False, SCALE, BLOCK_K, BLOCK_D, DEPTH,
                )  # fmt: skip

    before = part * tl.num_programs(2).to(tl.int64) * QUERIES * heads
    _store(o + before * HEAD_DIM, m + before, l + before, place, exists, out, most, total, HEAD_DIM, BLOCK_D)


@triton.jit
def _visit(
    out,
    most,
    total,
    q_tile,
    q_rows,
    exists,
    k_rows,
    v_rows,
    k_scales,
    v_scales,
    live,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Take in `BLOCK_K` rows, of which the first `live` are; rows are `STRIDE` numbers apart.

    Where they are `SCALED`, keys are scaled as their scores are, and values before they are multiplied.
    """
    row = tl.arange(0, BLOCK_K)
    k_at, lives = row * STRIDE, row < live
    k_tile = _part(k_rows + k_at, 0, lives, HEAD_DIM, DEPTH).to(q_tile.dtype)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    for deep in range(DEPTH, HEAD_DIM, DEPTH):
        q_part = _part(q_rows, deep, exists, HEAD_DIM, DEPTH)
        k_part = _part(k_rows + k_at, deep, lives, HEAD_DIM, DEPTH).to(q_tile.dtype)
        scores = tl.dot(q_part, tl.trans(k_part), scores, input_precision="ieee")
    if SCALED:
        scores *= tl.load(k_scales + row, mask=lives, other=0.0).to(tl.float32)[None, :]
    scores = tl.where(lives[None, :], scores, float("-inf"))
    # Called from Python a kernel's function raises: that is all that its type says.
    p, decay, most = weights(scores, most, SCALE, False)  # pyright: ignore[reportGeneralTypeIssues]
    v_tile = _part(v_rows + k_at, 0, lives, HEAD_DIM, BLOCK_D)
    if SCALED:
        scales = tl.load(v_scales + row, mask=lives, other=0.0).to(tl.float32)
        v_tile = (v_tile.to(tl.float32) * scales[:, None]).to(q_tile.dtype)
    out = tl.dot(p.to(v_tile.dtype), v_tile, out * decay[:, None], input_precision="ieee")
    return out, most, total * decay + tl.sum(p, 1)


@triton.jit
def _store(o, m, sums, place, exists, out, most, total, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write what rows have seen to their places in a part; a row that has seen no key is 0."""
    seen = total > 0
    out = out / tl.where(seen, total, 1.0)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    to = o + place.to(tl.int64)[:, None] * HEAD_DIM + column
    tl.store(to, out.to(o.dtype.element_ty), mask=exists[:, None] & (column < HEAD_DIM))
    log_2 = 0.6931471805599453
    tl.store(m + place, tl.where(seen, most * log_2, float("-inf")), mask=exists)
    tl.store(sums + place, total, mask=exists)


@triton.jit
def _part(rows, deep, exist, HEAD_DIM: tl.constexpr, DEPTH: tl.constexpr):
    """`DEPTH` numbers, from `deep` on, of heads at these pointers; 0 of rows that do not `exist`."""
    column = deep + tl.arange(0, DEPTH)[None, :]
    return tl.load(rows[:, None] + column, mask=exist[:, None] & (column < HEAD_DIM), other=0.0)
