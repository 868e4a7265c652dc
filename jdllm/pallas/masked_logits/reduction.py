"""What the kernel keeps of a tile of logits, reduced in registers, a strip of columns after the other."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.noise import threefry
from jdllm.pallas.hopper import STRIP, WARPGROUP_ROWS
from jdllm.pallas.masked_logits.extremes import LOWEST, NO_ID, NOTHING
from jdllm.pallas.masked_logits.gumbel import gumbel
from jdllm.pallas.masked_logits.row_table import Field, Mark, RowFields
from jdllm.pallas.masked_logits.tiles import Index, Tiles, id_of
from jdllm.pallas.masked_logits.types import Level

Scalar = Int[Array, ""]
Logits = Float[Array, "warpgroup_rows columns"]
Strip = Float[Array, "warpgroup_rows strip"]
PerRow = Float[Array, " warpgroup_rows"]
Ids = Int[Array, " warpgroup_rows"]

_UNROLLED = 4  # strips per round of noise: a straight line of them would not stay in the instruction cache


class Partials(NamedTuple):
    """Each row's logits over one tile of ids; unspecified for other rows than live ones and behind the tiles.

    - `score`: the largest logit, after noise was added where the row has a temperature.
    - `token`, `logit`: the lowest id with that score, and its logit without noise.
    - `maximum`, `total`: the largest measured logit and the sum of 2^(scale (logit - maximum)).

    Measured logits are those without the confidence's bans; they are not divided by a temperature yet.
    """

    score: Float[Array, "padded_splits padded_rows"]
    token: Int[Array, "padded_splits padded_rows"]
    logit: Float[Array, "padded_splits padded_rows"]
    maximum: Float[Array, "padded_splits padded_rows"]
    total: Float[Array, "padded_splits padded_rows"]


class Moments(NamedTuple):
    """What `Level.MOMENTS` keeps as well.

    - `second`: the second largest measured logit; the same as the largest where two are equal.
    - `weighted`: the sum of `Partials.total`, each term times its exponent.
    """

    second: Float[Array, "padded_splits padded_rows"]
    weighted: Float[Array, "padded_splits padded_rows"]


class _Best(NamedTuple):
    """The best score of each column of the strips seen so far, and the first id of the strip it was in."""

    score: Strip
    strip_id: Int[Array, "warpgroup_rows strip"]


def reduce_tile(
    logits: Logits, split: Scalar, mark: Scalar, scale: PerRow, rows: RowFields, tiles: Tiles, level: Level
) -> list[Array]:
    """Reduce the logits of tile `split` to the values of `Partials` and, where asked for, `Moments`."""
    if rows.penalised:
        logits = _penalised(logits, split, rows, tiles)
    removed = mark & Mark.REMOVED != 0

    def allowed(x: Logits) -> Logits:
        return _without(rows.token_bans, _below(x, split, rows, tiles), split, rows, tiles)

    def measured(x: Logits) -> Logits:
        return _without(rows.confidence_bans, x, split, rows, tiles)

    logits = lax.cond(removed, allowed, lambda x: x, logits)
    choice = lax.cond(
        mark & Mark.NOISE != 0,
        lambda x: _draw(x, split, rows, tiles),
        lambda x: _choose(x, split, tiles),
        logits,
    )
    logits = lax.cond(removed, measured, lambda x: x, logits)
    return [*choice, *_measure(logits, scale, level)]


def _penalised(logits: Logits, split: Scalar, rows: RowFields, tiles: Tiles) -> Logits:
    """The logits after penalties for ids that the rows' sequences hold."""
    fields = Field.REPETITION, Field.PRESENCE, Field.FREQUENCY
    repetition, presence, frequency = (_across(rows.floats(field)) for field in fields)
    nothing = _splat(0.0, jnp.float32)

    def changed(column: int) -> Strip:
        x, held = _strip(logits, column), rows.occurrences(tiles.first_id(split, column))
        divided = lax.select(x > 0, x / repetition, x * repetition)
        times = jnp.maximum(held - 1, 0).astype(jnp.float32)
        return lax.select(held > 0, divided, x) - frequency * times - lax.select(held > 1, presence, nothing)

    return lax.concatenate([changed(column) for column in _columns(tiles)], dimension=1)


def _below(logits: Logits, split: Scalar, rows: RowFields, tiles: Tiles) -> Logits:
    """The logits, `LOWEST` for ids from the limit on."""
    limit, position = rows.integers(Field.LIMIT), _positions()

    def kept(column: int) -> Strip:
        inside = position < _across(limit - tiles.first_id(split, column))
        return lax.select(inside, _strip(logits, column), _splat(LOWEST, jnp.float32))

    return lax.concatenate([kept(column) for column in _columns(tiles)], dimension=1)


def _without(lines: range, logits: Logits, split: Scalar, rows: RowFields, tiles: Tiles) -> Logits:
    """The logits, `LOWEST` for ids that one of these lines of `rows` bans."""
    position = _positions()

    def remove(line: Scalar, logits: Logits) -> Logits:
        ban = rows.integers(line)

        def kept(column: int) -> Strip:
            banned = position == _across(ban - tiles.first_id(split, column))
            return lax.select(banned, _splat(LOWEST, jnp.float32), _strip(logits, column))

        return lax.concatenate([kept(column) for column in _columns(tiles)], dimension=1)

    return lax.fori_loop(lines.start, lines.stop, remove, logits)


def _choose(logits: Logits, split: Scalar, tiles: Tiles) -> tuple[PerRow, Ids, PerRow]:
    """The largest logit, the lowest id with it, and the logit again."""
    best = [_nothing_yet(split, tiles) for _ in range(2)]
    for column in _columns(tiles):
        word = column // tiles.pairs
        best[word] = _better(best[word], _strip(logits, column), tiles.first_id(split, column))
    score, token = _winner(best)
    return score, token, score


def _draw(logits: Logits, split: Scalar, rows: RowFields, tiles: Tiles) -> tuple[PerRow, Ids, PerRow]:
    """The largest sum of logit and noise, the lowest id with it, and its logit."""
    key = (_across(rows.words(Field.KEY_0)), _across(rows.words(Field.KEY_1)))
    at, temperature = _across(rows.words(Field.POSITION)), _across(rows.floats(Field.TEMPERATURE))
    position = _positions()
    first = position + _across(rows.integers(Field.COUNTER))
    strips = tiles.pairs // STRIP
    unrolled = next(n for n in range(_UNROLLED, 0, -1) if strips % n == 0)

    def pick(i: Scalar, word: int, j: int) -> Strip:
        """Strip i * unrolled + j of a half: registers cannot be indexed, so one of all is selected."""
        picked, *others = (_strip(logits, word * tiles.pairs + k * STRIP) for k in range(j, strips, unrolled))
        for k, strip in enumerate(others):
            picked = jnp.where(i > k, strip, picked)
        return picked

    def visit(i: Scalar, best: list[_Best]) -> list[_Best]:
        best = list(best)
        for j in range(unrolled):
            counter = tiles.counter(split, (i * unrolled + j) * STRIP)
            bits = threefry(key, (at, (first + counter).astype(jnp.uint32)))
            for word in range(2):
                score = pick(i, word, j) + temperature * gumbel(bits[word])
                best[word] = _better(best[word], score, id_of(counter, word))
        return best

    best = [_nothing_yet(split, tiles) for _ in range(2)]
    score, token = _winner(lax.fori_loop(0, strips // unrolled, visit, best))
    logit = _splat(LOWEST, jnp.float32)
    for column in _columns(tiles):
        chosen = position == _across(token - tiles.first_id(split, column))
        logit = lax.select(chosen, _strip(logits, column), logit)
    return score, token, logit.max(axis=1)


def _nothing_yet(split: Scalar, tiles: Tiles) -> _Best:
    return _Best(_splat(-jnp.inf, jnp.float32), _splat(tiles.first_id(split, 0), jnp.int32))


def _better(best: _Best, score: Strip, strip_id: Index) -> _Best:
    better = score > best.score
    choices = zip((score, _splat(strip_id, jnp.int32)), best, strict=True)
    return _Best(*(lax.select(better, new, old) for new, old in choices))


def _winner(best: Sequence[_Best]) -> tuple[PerRow, Ids]:
    score = functools.reduce(jnp.maximum, (b.score for b in best)).max(axis=1)
    no_id, position = _splat(NO_ID, jnp.int32), _positions()
    ids = [lax.select(b.score == _across(score), b.strip_id + position, no_id) for b in best]
    return score, functools.reduce(jnp.minimum, ids).min(axis=1)


def _measure(logits: Logits, scale: PerRow, level: Level) -> list[PerRow]:
    """`maximum` and `total`, and where asked for `second` and `weighted`."""
    if level >= Level.MOMENTS:
        maximum, second = _top_two(logits)
    else:
        maximum, second = logits.max(axis=1), None
    top, scales = _across(maximum), _across(scale)
    total = weighted = _splat(0.0, jnp.float32)
    for column in range(0, logits.shape[1], STRIP):
        # The difference comes first, so that the largest logit counts 1 exactly.
        exponents = (_strip(logits, column) - top) * scales
        powers = jnp.exp2(exponents)
        total = total + powers
        if second is not None:
            weighted = weighted + powers * jnp.maximum(exponents, NOTHING)
    measures = [maximum, total.sum(axis=1)]
    return measures if second is None else [*measures, second, weighted.sum(axis=1)]


def _top_two(logits: Logits) -> tuple[PerRow, PerRow]:
    """The largest and the second largest logit."""
    best, second = _strip(logits, 0), _splat(LOWEST, jnp.float32)
    for column in range(STRIP, logits.shape[1], STRIP):
        strip = _strip(logits, column)
        second = jnp.maximum(second, jnp.minimum(strip, best))
        best = jnp.maximum(best, strip)
    maximum, position = best.max(axis=1), _positions()
    at = lax.select(best == _across(maximum), position, _splat(STRIP, jnp.int32)).min(axis=1)
    return maximum, lax.select(position == _across(at), second, best).max(axis=1)


def _columns(tiles: Tiles) -> range:
    """The first columns of a tile's strips."""
    return range(0, tiles.columns, STRIP)


def _strip(logits: Logits, column: int) -> Strip:
    return logits[:, column : column + STRIP]


def _positions() -> Int[Array, "warpgroup_rows strip"]:
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS, STRIP), 1, layout=plgpu.Layout.WGMMA)


def _splat(value: Index | float, dtype: jnp.dtype) -> Array:
    filled = lax.broadcast_in_dim(jnp.asarray(value, dtype), (WARPGROUP_ROWS, STRIP), [])
    return plgpu.layout_cast(filled, plgpu.Layout.WGMMA)


def _across(values: Array, columns: int = STRIP) -> Array:
    return lax.broadcast_in_dim(values, (WARPGROUP_ROWS, columns), [0])
