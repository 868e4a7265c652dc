"""The kernel of masked logits in Triton, for NVIDIA cards from Ampere on.

A program multiplies some rows with a part of the vocabulary, a tile after the other, and keeps a few numbers
of each row. The ids of a tile are those of `PAIRS` counters of the noise (`jdllm.noise.vocabulary_bits`): one
call of the generator gives the bits of two ids that are `jdllm.noise.LANES` apart, one of each half of the
tile's columns.
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
    first_counter,
    limit,
    temperature,
    divisor,
    token_bans,
    confidence_bans,
    occurrences,
    sequence,
    repetition,
    presence,
    frequency,
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
    PENALISED: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Reduce a part of the vocabulary for `BLOCK_R` rows that `RowSampling` describes."""
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
    sum_, moment = tl.zeros([BLOCK_R], tl.float32), tl.zeros([BLOCK_R], tl.float32)
    tiles = tl.cdiv(vocab, 2 * _LANES) * _LANES // PAIRS
    begin = part * tl.cdiv(tiles, PARTS)
    end = tl.minimum(begin + tl.cdiv(tiles, PARTS), tiles)
    end = tl.where(first_row < tl.load(count), end, 0)
    # What is loaded of a row stays in the cache; held over the loop it would take registers from the product.
    for tile in range(begin, end):
        first = tile * PAIRS
        ids = _ids(first // _LANES * _LANES + first, PAIRS)
        x = _logits(hidden, head, first_row, ids, exists, vocab, DEPTH, BLOCK_R, PAIRS, BLOCK_D)
        if PENALISED:
            held = _held(occurrences, sequence, row, ids, exists, vocab)
            x = _penalised(x, held, repetition, presence, frequency, row, exists)
        x = _below(x, ids, limit, row, exists)
        x = _without(x, ids, token_bans, row, exists, TOKEN_BANS)
        scores = x
        if noisy:
            counter = tl.load(first_counter) + first + tl.arange(0, PAIRS)
            scores = _noised(x, heat, key_0, key_1, position, row, exists, counter, BLOCK_R, PAIRS)
        best, best_id, best_logit = _chosen(scores, x, ids, best, best_id, best_logit)
        x = _without(x, ids, confidence_bans, row, exists, CONFIDENCE_BANS)
        most, next_most, sum_, moment = _measured(x, ids, scale, most, next_most, sum_, moment, MOMENTS)

    to = part.to(tl.int64) * rows + row
    tl.store(score + to, best, mask=exists)
    tl.store(token + to, best_id, mask=exists)
    tl.store(logit + to, best_logit, mask=exists)
    tl.store(maximum + to, most, mask=exists)
    tl.store(total + to, sum_, mask=exists)
    tl.store(second + to, next_most, mask=exists)
    tl.store(weighted + to, moment, mask=exists)


@triton.jit
def _chosen(scores, x, ids, best, best_id, best_logit):
    """The best score so far, its id and its logit, after one more tile."""
    top, top_id = _largest(scores, ids)
    found = tl.max(tl.where(ids[None, :] == top_id[:, None], x, _LOWEST), 1)
    better = (top > best) | ((top == best) & (top_id < best_id))
    best, best_id = tl.where(better, top, best), tl.where(better, top_id, best_id)
    return best, best_id, tl.where(better, found, best_logit)


@triton.jit
def _measured(x, ids, scale, most, next_most, sum_, moment, MOMENTS: tl.constexpr):
    """The measures so far after one more tile: sums are rescaled to the largest logit of all."""
    if MOMENTS:
        top, top_id = _largest(x, ids)
        other = tl.max(tl.where(ids[None, :] == top_id[:, None], _LOWEST, x), 1)
        next_most = tl.maximum(tl.maximum(next_most, other), tl.minimum(most, top))
    else:
        top = tl.max(x, 1)
    new_most = tl.maximum(most, top)
    # The difference comes first, so that the largest logit counts 1 exactly.
    exponent = (x - new_most[:, None]) * scale[:, None]
    p = tl.exp2(exponent)
    decay = (most - new_most) * scale
    if MOMENTS:
        moment = (moment + sum_ * tl.maximum(decay, _NOTHING)) * tl.exp2(decay)
        moment += tl.sum(p * tl.maximum(exponent, _NOTHING), 1)
    return new_most, next_most, sum_ * tl.exp2(decay) + tl.sum(p, 1), moment


@triton.jit
def _ids(first_id, PAIRS: tl.constexpr):
    """The ids of a tile: those of the first words, then those of the second."""
    column = tl.arange(0, 2 * PAIRS)
    return first_id + column % PAIRS + column // PAIRS * _LANES


@triton.jit
def _logits(
    hidden,
    head,
    first_row,
    ids,
    exists,
    vocab,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The products of rows with these ids; 0 for ids behind the vocabulary."""
    column, line = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    x_rows = hidden + first_row.to(tl.int64) * DEPTH
    x_at = line[:, None] * DEPTH + column[None, :]
    w_at = ids.to(tl.int64)[None, :] * DEPTH + column[:, None]
    inside = ids < vocab
    product = tl.zeros([BLOCK_R, 2 * PAIRS], tl.float32)
    for k in range(0, DEPTH, BLOCK_D):
        deep = column < DEPTH - k
        x = tl.load(x_rows + k + x_at, mask=exists[:, None] & deep[None, :], other=0.0)
        w = tl.load(head + k + w_at, mask=inside[None, :] & deep[:, None], other=0.0)
        product = tl.dot(x, w, product, input_precision="ieee")
    return product


@triton.jit
def _held(occurrences, sequence, row, ids, exists, vocab):
    """How often each row's sequence holds these ids, as `RowPenalty` counts; 0 behind the vocabulary."""
    own = tl.load(sequence + row, mask=exists, other=0).to(tl.int64) * vocab
    inside = exists[:, None] & (ids < vocab)[None, :]
    return tl.load(occurrences + own[:, None] + ids[None, :], mask=inside, other=0)


@triton.jit
def _penalised(x, held, repetition, presence, frequency, row, exists):
    """The logits after penalties for ids that occur `held` times, as `RowPenalty` counts them."""
    by = tl.load(repetition + row, mask=exists, other=1.0)[:, None]
    once = tl.load(presence + row, mask=exists, other=0.0)[:, None]
    each = tl.load(frequency + row, mask=exists, other=0.0)[:, None]
    # One element after the other: all at once they would not fit into registers.
    return tl.map_elementwise(_penalised_one, x, held, by, once, each)


@triton.jit
def _penalised_one(x, held, repetition, presence, frequency):
    x = tl.where(held > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    return tl.where(held > 1, x - frequency * (held - 1) - presence, x)


@triton.jit
def _below(x, ids, limit, row, exists):
    """The logits, `_LOWEST` for ids from the limit on."""
    last = tl.load(limit + row, mask=exists, other=0)
    return tl.where(ids[None, :] < last[:, None], x, _LOWEST)


@triton.jit
def _without(x, ids, bans, row, exists, BANS: tl.constexpr):
    """The logits, `_LOWEST` for those banned."""
    for ban in tl.static_range(BANS):
        banned = tl.load(bans + row * BANS + ban, mask=exists, other=-1)
        x = tl.where(ids[None, :] == banned[:, None], _LOWEST, x)
    return x


@triton.jit
def _noised(
    x,
    heat,
    key_0,
    key_1,
    position,
    row,
    exists,
    counter,
    BLOCK_R: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The logits with their noise."""
    key_0 = tl.load(key_0 + row, mask=exists, other=0)[:, None]
    key_1 = tl.load(key_1 + row, mask=exists, other=0)[:, None]
    at = tl.load(position + row, mask=exists, other=0).to(tl.uint32)[:, None]
    x_0, x_1 = tl.split(tl.permute(tl.reshape(x, [BLOCK_R, 2, PAIRS]), [0, 2, 1]))
    # One element after the other: all at once they would not fit into registers.
    x_0, x_1 = tl.map_elementwise(
        _noised_pair, x_0, x_1, heat[:, None], key_0, key_1, at, counter.to(tl.uint32)[None, :]
    )
    return tl.reshape(tl.permute(tl.join(x_0, x_1), [0, 2, 1]), [BLOCK_R, 2 * PAIRS])


@triton.jit
def _noised_pair(x_0, x_1, heat, key_0, key_1, position, counter):
    bits_0, bits_1 = threefry(key_0, key_1, position, counter)
    return x_0 + heat * gumbel(bits_0), x_1 + heat * gumbel(bits_1)


@triton.jit
def _largest(x, ids):
    """The largest value of each row, and the lowest id that has it."""
    top = tl.max(x, 1)
    return top, tl.min(tl.where(x == top[:, None], ids[None, :], _NO_ID), 1)
