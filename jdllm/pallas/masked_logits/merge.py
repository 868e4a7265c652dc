"""The second kernel of masked logits: what was kept of each tile of ids becomes one result for each row.

A warpgroup takes eight rows, whose values of one tile are the 32 bytes that a memory access moves at least,
and goes through the tiles in chunks, with the loads of several chunks in flight.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.pallas.hopper import STRIP
from jdllm.pallas.masked_logits.extremes import LOWEST, NO_ID, NOTHING
from jdllm.pallas.masked_logits.reduction import Moments, Partials
from jdllm.pallas.masked_logits.row_table import Field
from jdllm.pallas.masked_logits.tiles import CHUNK
from jdllm.pallas.masked_logits.types import RowDecision
from jdllm.pallas.ring import COMPILER_PARAMS
from jdllm.pallas.shared_lowering import lowered_once

Scalar = Int[Array, ""]
Chunk = Float[Array, "chunk strip"]
Ids = Int[Array, "chunk strip"]
PerRow = Float[Array, " strip"]

_IN_FLIGHT = 4  # chunks: of each a thread has four numbers of every field
_LAYOUT = plgpu.Layout.WGMMA


@lowered_once("rows", "splits")
def merge_tiles(
    partials: Partials,
    moments: Moments | None,
    words: Int[Array, "fields padded_rows"],
    count: Scalar,
    rows: int,
    splits: int,
) -> RowDecision:
    """Merge what `head_partials` returned.

    Arguments:
    - `words`, `count`: as given to it.
    - `rows`: how many to return, a multiple of 8; what is returned for those from `count` on is unspecified.
    - `splits`: how many tiles of ids there are.
    """
    tiles = (*partials, *(moments or ()))
    floats = jax.ShapeDtypeStruct((rows,), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, splits=splits, fields=len(tiles)),
        out_type=[jax.ShapeDtypeStruct((rows,), jnp.int32), *[floats] * (len(tiles) - 2)],
        grid=(rows // STRIP,),
        grid_names=("strip",),
        compiler_params=COMPILER_PARAMS,
        kernel_name="merge_masked_logits",
    )
    token, logit, maximum, total, *rest = kernel(*tiles, words, count.reshape(1))
    if moments is None:
        unknown = jnp.zeros_like(maximum)
        return RowDecision(token, logit, maximum, total, second=unknown, negative_entropy=unknown)
    second, weighted = rest
    negative_entropy = weighted * math.log(2) / total - jnp.log(total)
    return RowDecision(token, logit, maximum, total, second, negative_entropy)


class _Seen(NamedTuple):
    """`Partials` and `Moments` of the tiles that a thread has seen."""

    score: Chunk
    token: Ids
    logit: Chunk
    maximum: Chunk
    total: Chunk
    moments: Moments | None


_NONE = (-math.inf, NO_ID, LOWEST, LOWEST, 0.0, LOWEST, 0.0)  # of no tiles at all


def _kernel(*refs, splits: int, fields: int) -> None:
    tiles, (words, count, *out) = refs[:fields], refs[fields:]
    first = lax.axis_index("strip") * STRIP
    rows = pl.ds(first, STRIP)

    @pl.when(first < count[0])
    def _merge():
        line = words.at[Field.DIVISOR, rows]
        bits = plgpu.load(line, layout=_LAYOUT.reduce(0), optimized=False)
        divisor = lax.bitcast_convert_type(bits, jnp.float32)
        scale = _across(math.log2(math.e) / divisor)
        chunks = _chunks(tiles, rows, splits)
        seen = functools.reduce(lambda a, b: _joined(a, b, scale), chunks)
        for ref, result in zip(out, _over_threads(seen, divisor, scale), strict=True):
            ref[rows] = result


def _chunks(tiles: Sequence[Any], rows: Any, splits: int) -> Iterator[_Seen]:
    """Chunks of tiles; nothing was written behind the last tile."""
    position, nothing = _positions(), _NONE[: len(tiles)]

    def load(ref: Any, start: int, none: float) -> Array:
        values = plgpu.load(ref.at[pl.ds(start, CHUNK), rows], layout=_LAYOUT, optimized=False)
        whole = start + CHUNK <= splits
        return values if whole else lax.select(position < splits - start, values, _splat(none, values.dtype))

    for starts in itertools.batched(range(0, splits, CHUNK), _IN_FLIGHT):
        loaded = [
            [load(ref, start, none) for ref, none in zip(tiles, nothing, strict=True)] for start in starts
        ]
        for score, token, logit, maximum, total, *moments in loaded:
            yield _Seen(score, token, logit, maximum, total, Moments(*moments) if moments else None)


def _joined(a: _Seen, b: _Seen, scale: Chunk) -> _Seen:
    """Two sets of tiles of the same rows as one."""
    better = (b.score > a.score) | ((b.score == a.score) & (b.token < a.token))
    score, token, logit = (lax.select(better, new, old) for new, old in zip(b[:3], a[:3], strict=True))
    maximum = jnp.maximum(a.maximum, b.maximum)
    old, new = (_raised(x, maximum, scale) for x in (a, b))
    moments = None
    if old.moments is not None and new.moments is not None:
        second = jnp.maximum(old.moments.second, new.moments.second)
        second = jnp.maximum(second, jnp.minimum(a.maximum, b.maximum))
        moments = Moments(second, old.moments.weighted + new.moments.weighted)
    return _Seen(score, token, logit, maximum, old.total + new.total, moments)


def _raised(seen: _Seen, maximum: Chunk, scale: Chunk) -> _Seen:
    """The same with this larger `maximum`."""
    exponent = (seen.maximum - maximum) * scale
    decay = jnp.exp2(exponent)
    moments = seen.moments
    if moments is not None:
        weighted = (moments.weighted + seen.total * jnp.maximum(exponent, NOTHING)) * decay
        moments = moments._replace(weighted=weighted)
    return seen._replace(maximum=maximum, total=seen.total * decay, moments=moments)


def _over_threads(seen: _Seen, divisor: PerRow, scale: Chunk) -> list[Array]:
    """What the kernel returns for its rows."""
    no_id, lowest = _splat(NO_ID, jnp.int32), _splat(LOWEST, jnp.float32)
    best = seen.score == _across(seen.score.max(axis=0))
    token = lax.select(best, seen.token, no_id).min(axis=0)
    logit = lax.select(seen.token == _across(token), seen.logit, lowest).max(axis=0)
    maximum = seen.maximum.max(axis=0)
    raised = _raised(seen, _across(maximum), scale)
    results = [token, logit / divisor, maximum / divisor, raised.total.sum(axis=0)]
    if raised.moments is None:
        return results
    top = lax.select(seen.maximum == _across(maximum), _positions(), _splat(CHUNK, jnp.int32)).min(axis=0)
    second = lax.select(_positions() == _across(top), raised.moments.second, seen.maximum).max(axis=0)
    none = second == LOWEST
    return [*results, jnp.where(none, -jnp.inf, second / divisor), raised.moments.weighted.sum(axis=0)]


def _positions() -> Ids:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, STRIP), 0, layout=_LAYOUT)


def _splat(value: float, dtype: jnp.dtype) -> Array:
    return plgpu.layout_cast(jnp.full((CHUNK, STRIP), value, dtype), _LAYOUT)


def _across(values: Array) -> Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (CHUNK, STRIP), [1]), _LAYOUT)
