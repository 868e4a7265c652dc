"""The kernel of masked logits in Triton, for NVIDIA cards from Ampere on.

A program multiplies some rows with a part of the vocabulary, a tile after the other, and keeps a few numbers
of each row. The ids of a tile are those of `PAIRS` counters of the noise (`jdllm.noise.vocabulary_bits`): one
call of the generator gives the bits of two ids that are `jdllm.noise.LANES` apart, so that each of them has a
product.
"""

# Called from Python a kernel's function raises: that is all that its type says.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from jdllm import noise
from jdllm.pallas.masked_logits import extremes
from jdllm.pallas.masked_logits.triton_noise import gumbel, threefry

_LANES = tl.constexpr(noise.LANES)
_LOWEST = tl.constexpr(extremes.LOWEST)
_NO_ID = tl.constexpr(extremes.NO_ID)
_NOTHING = tl.constexpr(extremes.NOTHING)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def reduce_logits(
    hidden,
    head,
    key_0,
    key_1,
    position,
    limit,
    temperature,
    divisor,
    token_bans,
    confidence_bans,
    count,
    rows,
    vocab,
    score,
    token,
    logit,
    maximum,
    total,
    second,
    weighted,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKEN_BANS: tl.constexpr,
    CONFIDENCE_BANS: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Reduce one of `PARTS` parts of the vocabulary for `BLOCK_R` rows, none of them from `count` on.

    Pointers are those of `RowSampling`'s columns and of `triton.Partials`.
    """
    first_row, part = tl.program_id(0) * BLOCK_R, tl.program_id(1)
    row = first_row + tl.arange(0, BLOCK_R)
    exists = row < rows
    heat = tl.load(temperature + row, mask=exists, other=0.0)
    scale = _LOG2_E / tl.load(divisor + row, mask=exists, other=1.0)
    noisy = tl.max(heat) > 0

    best = tl.full([BLOCK_R], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK_R], _NO_ID, tl.int32)
    best_logit = tl.full([BLOCK_R], _LOWEST, tl.float32)
    most, next_most = best_logit, best_logit
    sum_, sum_weighted = tl.zeros([BLOCK_R], tl.float32), tl.zeros([BLOCK_R], tl.float32)
    tiles = tl.cdiv(vocab, 2 * _LANES) * _LANES // PAIRS
    size = tl.cdiv(tiles, PARTS)
    begin = part * size
    end = tl.where(first_row < tl.load(count), tl.minimum(begin + size, tiles), 0)
    for tile in range(begin, end):
        first = tile * PAIRS
        first_id = first // _LANES * _LANES + first
        counter, id_0 = first + tl.arange(0, PAIRS), first_id + tl.arange(0, PAIRS)
        x_0, x_1 = _logits(hidden, head, first_row, first_id, exists, vocab, DEPTH, BLOCK_R, PAIRS, BLOCK_D)
        last = tl.load(limit + row, mask=exists, other=0)
        x_0 = _allowed(x_0, id_0, last, token_bans, row, exists, TOKEN_BANS)
        x_1 = _allowed(x_1, id_0 + _LANES, last, token_bans, row, exists, TOKEN_BANS)

        s_0, s_1 = x_0, x_1
        if noisy:
            s_0, s_1 = _noised(x_0, x_1, heat, key_0, key_1, position, row, exists, counter)
        top, top_id = _largest(s_0, s_1, id_0)
        found = _at(x_0, x_1, id_0, top_id)
        better = (top > best) | ((top == best) & (top_id < best_id))
        best, best_id = tl.where(better, top, best), tl.where(better, top_id, best_id)
        best_logit = tl.where(better, found, best_logit)

        x_0 = _without(x_0, id_0, confidence_bans, row, exists, CONFIDENCE_BANS)
        x_1 = _without(x_1, id_0 + _LANES, confidence_bans, row, exists, CONFIDENCE_BANS)
        if MOMENTS:
            top, top_id = _largest(x_0, x_1, id_0)
            other_0 = tl.where(id_0[None, :] == top_id[:, None], _LOWEST, x_0)
            other_1 = tl.where(id_0[None, :] + _LANES == top_id[:, None], _LOWEST, x_1)
            other = tl.maximum(tl.max(other_0, 1), tl.max(other_1, 1))
            next_most = tl.maximum(tl.maximum(next_most, other), tl.minimum(most, top))
        else:
            top = tl.maximum(tl.max(x_0, 1), tl.max(x_1, 1))
        new_most = tl.maximum(most, top)
        # The difference comes first, so that the largest logit counts 1 exactly.
        e_0 = (x_0 - new_most[:, None]) * scale[:, None]
        e_1 = (x_1 - new_most[:, None]) * scale[:, None]
        p_0, p_1 = tl.exp2(e_0), tl.exp2(e_1)
        decay = (most - new_most) * scale
        if MOMENTS:
            sum_weighted = (sum_weighted + sum_ * tl.maximum(decay, _NOTHING)) * tl.exp2(decay)
            sum_weighted += tl.sum(p_0 * tl.maximum(e_0, _NOTHING), 1)
            sum_weighted += tl.sum(p_1 * tl.maximum(e_1, _NOTHING), 1)
        sum_ = sum_ * tl.exp2(decay) + tl.sum(p_0, 1) + tl.sum(p_1, 1)
        most = new_most

    to = part.to(tl.int64) * rows + row
    tl.store(score + to, best, mask=exists)
    tl.store(token + to, best_id, mask=exists)
    tl.store(logit + to, best_logit, mask=exists)
    tl.store(maximum + to, most, mask=exists)
    tl.store(total + to, sum_, mask=exists)
    tl.store(second + to, next_most, mask=exists)
    tl.store(weighted + to, sum_weighted, mask=exists)


@triton.jit
def _logits(
    hidden,
    head,
    first_row,
    first_id,
    exists,
    vocab,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The products of rows with the ids of both words; 0 for ids behind the vocabulary."""
    column, line, pair = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R), tl.arange(0, PAIRS)
    x_rows = hidden + first_row.to(tl.int64) * DEPTH
    w_0_rows = head + first_id.to(tl.int64) * DEPTH
    w_1_rows = w_0_rows + _LANES * DEPTH
    x_at = line[:, None] * DEPTH + column[None, :]
    w_at = pair[None, :] * DEPTH + column[:, None]
    inside_0, inside_1 = first_id + pair < vocab, first_id + _LANES + pair < vocab
    x_0 = tl.zeros([BLOCK_R, PAIRS], tl.float32)
    x_1 = tl.zeros([BLOCK_R, PAIRS], tl.float32)
    for k in range(0, DEPTH, BLOCK_D):
        deep = column < DEPTH - k
        x = tl.load(x_rows + k + x_at, mask=exists[:, None] & deep[None, :], other=0.0)
        w_0 = tl.load(w_0_rows + k + w_at, mask=inside_0[None, :] & deep[:, None], other=0.0)
        w_1 = tl.load(w_1_rows + k + w_at, mask=inside_1[None, :] & deep[:, None], other=0.0)
        x_0 = tl.dot(x, w_0, x_0, input_precision="ieee")
        x_1 = tl.dot(x, w_1, x_1, input_precision="ieee")
    return x_0, x_1


@triton.jit
def _allowed(x, ids, limit, bans, row, exists, BANS: tl.constexpr):
    """The logits, `_LOWEST` for ids from the limit on and for those banned."""
    return _without(tl.where(ids[None, :] < limit[:, None], x, _LOWEST), ids, bans, row, exists, BANS)


@triton.jit
def _without(x, ids, bans, row, exists, BANS: tl.constexpr):
    for ban in tl.static_range(BANS):
        banned = tl.load(bans + row * BANS + ban, mask=exists, other=-1)
        x = tl.where(ids[None, :] == banned[:, None], _LOWEST, x)
    return x


@triton.jit
def _noised(x_0, x_1, heat, key_0, key_1, position, row, exists, counter):
    """The logits with their noise."""
    key_0 = tl.load(key_0 + row, mask=exists, other=0)[:, None]
    key_1 = tl.load(key_1 + row, mask=exists, other=0)[:, None]
    at = tl.load(position + row, mask=exists, other=0).to(tl.uint32)[:, None]
    # One element after the other: all at once they would not fit into registers.
    return tl.map_elementwise(
        _noised_pair, x_0, x_1, heat[:, None], key_0, key_1, at, counter.to(tl.uint32)[None, :]
    )


@triton.jit
def _noised_pair(x_0, x_1, heat, key_0, key_1, position, counter):
    bits_0, bits_1 = threefry(key_0, key_1, position, counter)
    return x_0 + heat * gumbel(bits_0), x_1 + heat * gumbel(bits_1)


@triton.jit
def _largest(x_0, x_1, id_0):
    """The largest value of each row, and the lowest id that has it."""
    top = tl.maximum(tl.max(x_0, 1), tl.max(x_1, 1))
    ids_0 = tl.where(x_0 == top[:, None], id_0[None, :], _NO_ID)
    ids_1 = tl.where(x_1 == top[:, None], id_0[None, :] + _LANES, _NO_ID)
    return top, tl.minimum(tl.min(ids_0, 1), tl.min(ids_1, 1))


@triton.jit
def _at(x_0, x_1, id_0, wanted):
    """Each row's value of the id that is wanted."""
    found_0 = tl.where(id_0[None, :] == wanted[:, None], x_0, _LOWEST)
    found_1 = tl.where(id_0[None, :] + _LANES == wanted[:, None], x_1, _LOWEST)
    return tl.maximum(tl.max(found_0, 1), tl.max(found_1, 1))
