"""Masked logits in Triton: one kernel reduces parts of the vocabulary, XLA merges them."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jdllm.pallas.device import target
from jdllm.pallas.masked_logits.extremes import LOWEST
from jdllm.pallas.masked_logits.limits import PROGRAMS, check_triton
from jdllm.pallas.masked_logits.tiles import counter_of
from jdllm.pallas.masked_logits.triton_kernel import reduce_logits
from jdllm.pallas.masked_logits.types import Level, RowDecision, RowPenalty, RowSampling
from jdllm.pallas.triton_launch import LEAST, MANY, ProductSizes, Schedule, SizeTable, fitting, launch


class Partials(NamedTuple):
    """Each row's logits over one part of the vocabulary.

    - `score`: the largest logit, after noise was added where the row has a temperature.
    - `token`, `logit`: the lowest id with that score, and its logit without noise.
    - `maximum`, `total`: the largest measured logit and the sum of 2^(scale (logit - maximum)), where scale
      is log2(e) over what a row's logits are divided by.
    - `second`: the second largest measured logit, the same as the largest where two are equal.
    - `weighted`: the sum of `total`, each term times its exponent.

    Measured logits are those without the confidence's bans; they are not divided yet. The last two are
    known from `Level.MOMENTS` on.
    """

    score: Float[Array, "parts rows"]
    token: Int[Array, "parts rows"]
    logit: Float[Array, "parts rows"]
    maximum: Float[Array, "parts rows"]
    total: Float[Array, "parts rows"]
    second: Float[Array, "parts rows"]
    weighted: Float[Array, "parts rows"]


_SIZES: SizeTable[ProductSizes] = {
    2: (
        (16, 99, ProductSizes(16, 128, 64, Schedule(4, 4))),
        (32, 227, ProductSizes(32, 128, 64, Schedule(4, 3))),
        (32, 99, ProductSizes(32, 128, 64, Schedule(4, 4))),
        (64, 99, ProductSizes(64, 128, 64, Schedule(8, 4))),
        (256, 227, ProductSizes(128, 128, 64, Schedule(8, 5))),
        (MANY, 227, ProductSizes(128, 128, 64, Schedule(8, 4))),
        (MANY, 99, ProductSizes(128, 64, 64, Schedule(8, 4))),
    ),
    4: (
        (16, 99, ProductSizes(16, 256, 32, Schedule(4, 2))),
        (32, 99, ProductSizes(32, 256, 32, Schedule(4, 2))),
        (MANY, 99, ProductSizes(64, 128, 16, Schedule(4, 3))),
    ),
}
"""Of up to so many rows. A word of the noise has half of the columns of a tile, for up to 128 counters."""


_NO_PENALTY = RowPenalty(
    np.zeros((1, 1), np.int32), np.zeros(1, np.int32), *(np.zeros(1, np.float32) for _ in range(3))
)
"""What the kernel is given, and never reads, where no row has a penalty."""

sizes_for = functools.partial(fitting, _SIZES)


def masked_logits_triton(
    hidden: Float[Array, "rows d"],
    head: Float[Array, "vocab d"],
    rows: RowSampling,
    level: Level,
    *,
    count: Int[Array, ""] | int | None = None,
    sizes: ProductSizes | None = None,
) -> RowDecision:
    """Triton form of `jdllm.pallas.masked_logits.masked_logits`, without an array of rows x vocabulary.

    Products are accumulated in f32. `negative_entropy` is the sum of p ln(p), which is below that of
    p ln(p + 1e-10) by less than 1e-10 times the size of the vocabulary.

    Arguments:
    - `sizes`: by default those of the device that is traced for.

    Raises `NotImplementedError` where `check_triton` does.
    """
    check_triton(hidden, head, level)
    number, vocab = len(hidden), len(head)
    # Counts of ids for more rows of a program would not fit into registers. Programs of the same part of the
    # head run side by side, so that this part is read once all the same.
    at_once = number if rows.penalty is None else LEAST
    sizes = sizes or sizes_for(at_once, hidden.dtype.itemsize, target().capability)
    blocks = -(-number // sizes.rows)
    parts = max(1, min(PROGRAMS // blocks, -(-vocab // sizes.columns)))
    shape = parts, number
    temperature, divisor = jnp.asarray(rows.temperature, jnp.float32), rows.divisor
    integers = (rows.positions, rows.limit, rows.token_bans, rows.confidence_bans)
    positions, limit, token_bans, confidence_bans = (jnp.asarray(x, jnp.int32) for x in integers)
    penalty = rows.penalty or _NO_PENALTY
    live = jnp.asarray(number if count is None else count, jnp.int32).reshape(1)
    first = jnp.zeros(1, jnp.int32) if rows.first_id is None else counter_of(jnp.asarray(rows.first_id)[:1])
    partials = launch(
        reduce_logits,
        *(hidden, head, *rows.keys, positions, first, jnp.minimum(limit, vocab), temperature, divisor),
        *(token_bans, confidence_bans, *map(jnp.asarray, penalty), live, number, vocab),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.int32 if field == "token" else jnp.float32)
            for field in Partials._fields
        ],
        grid=(blocks, parts),
        schedule=sizes.schedule,
        PARTS=parts,
        DEPTH=hidden.shape[1],
        TOKEN_BANS=token_bans.shape[1],
        CONFIDENCE_BANS=confidence_bans.shape[1],
        PENALISED=rows.penalty is not None,
        MOMENTS=level >= Level.MOMENTS,
        BLOCK_R=sizes.rows,
        PAIRS=sizes.columns // 2,
        BLOCK_D=sizes.depth,
    )
    return _merged(Partials(*partials), divisor, vocab, level)


def _merged(parts: Partials, divisor: Float[Array, " rows"], vocab: int, level: Level) -> RowDecision:
    best = parts.score == parts.score.max(axis=0)
    # Logits that are not numbers have no largest: any id does.
    token = jnp.where(best, parts.token, vocab - 1).min(axis=0, initial=vocab - 1)
    logit = jnp.where(parts.token == token, parts.logit, -jnp.inf).max(axis=0)
    maximum = parts.maximum.max(axis=0)
    exponent = (parts.maximum - maximum) * (math.log2(math.e) / divisor)
    decay = jnp.exp2(exponent)
    total = (parts.total * decay).sum(axis=0)
    logit, top = logit / divisor, maximum / divisor
    if level < Level.MOMENTS:
        none = jnp.zeros_like(total)
        return RowDecision(token, logit, top, total, none, none)
    at = parts.maximum.argmax(axis=0)
    others = jnp.where(jnp.arange(len(decay))[:, None] == at, parts.second, parts.maximum)
    second = others.max(axis=0)
    second = jnp.where(second == LOWEST, -jnp.inf, second / divisor)
    # Where the decay is 0 the exponent may be infinite.
    moved = jnp.where(decay > 0, parts.weighted + parts.total * exponent, 0.0) * decay
    negative_entropy = moved.sum(axis=0) * math.log(2) / total - jnp.log(total)
    return RowDecision(token, logit, top, total, second, negative_entropy)
