"""The two stages in between, in NumPy float64: which tokens of a chunk are kept, and the cache they make."""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tests.prefilling.oracle import Tokens, row_mask
from tests.prefilling.oracle_model import Cache, Model, forward, joined

Rows = Int[np.ndarray, "kept"] | Int[np.ndarray, "layers kv_heads kept"]

TokenMask = Literal["causal", "query_to_chunk", "full"]


class Retention(NamedTuple):
    """How many tokens of a chunk are kept (0: all), and by which attention."""

    capacity: int
    window: int = 8
    mask: TokenMask = "causal"
    direction: Literal["query_to_chunk", "chunk_to_query", "bidirectional"] = "query_to_chunk"
    reduce: Literal["sum", "mean"] = "sum"
    pooling: Literal["maxpool", "avgpool", "none"] = "maxpool"
    kernel: int = 7
    head_reduce: Literal["sum", "mean", "max"] = "sum"
    layer_reduce: Literal["sum", "mean", "max"] = "mean"
    layers: int = 0
    layer_mode: Literal["all", "first", "last"] = "all"
    keep: Literal["high", "low"] = "high"
    with_prefix: bool = True
    keep_bos: bool = True
    per_head: bool = False


def token_mask(kind: TokenMask, prefix: int, chunk: int, window: int) -> Bool[np.ndarray, "row row"]:
    """Who sees whom in a row of prefix, chunk and window. Unlike in scoring, "full" is everything."""
    return row_mask("none" if kind == "full" else kind, prefix, chunk, window)


def keep(
    model: Model, prefix: Tokens, chunk: Tokens, ask: Tokens, retention: Retention
) -> tuple[Rows, Float[np.ndarray, "... chunk"] | None]:
    """The kept places of a chunk in ascending order, and the scores if any were needed.

    `ask` are the tokens whose last `window` look at the chunk: the query, perhaps with the filled labels.
    """
    shape = (len(model.layers), model.kv_heads) if retention.per_head else ()
    if not 0 < retention.capacity < len(chunk):
        return np.broadcast_to(np.arange(len(chunk)), (*shape, len(chunk))), None
    scores = retention_scores(model, prefix, chunk, ask, retention)
    order = -scores if retention.keep == "high" else scores.copy()
    if retention.keep_bos:
        order[..., 0] = -np.inf
    best = np.argsort(order, axis=-1, kind="stable")[..., : retention.capacity]
    return np.sort(best, axis=-1), scores


def retention_scores(
    model: Model, prefix: Tokens, chunk: Tokens, ask: Tokens, retention: Retention
) -> Float[np.ndarray, "... chunk"]:
    """Pooled and reduced attention between window and chunk: `[chunk]`, or `[layers, kv_heads, chunk]`."""
    front = len(prefix) if retention.with_prefix else 0
    window = ask[-retention.window :]
    row = np.concatenate([prefix[:front], chunk, window])
    seen = token_mask(retention.mask, front, len(chunk), len(window))
    places = np.arange(len(row))
    attention = forward(model, row, places, seen, watch=places).attention
    inside, behind = slice(front, front + len(chunk)), slice(front + len(chunk), None)
    reduce = {"sum": np.sum, "mean": np.mean}[retention.reduce]
    scores = np.zeros((*attention.shape[:2], len(chunk)))
    if retention.direction != "chunk_to_query":
        scores += reduce(attention[:, :, behind, inside], axis=2)
    if retention.direction != "query_to_chunk":
        scores += reduce(attention[:, :, inside, behind], axis=3)
    return _reduced(_pooled(scores, retention), model.kv_heads, retention)


def _pooled(
    scores: Float[np.ndarray, "layers heads chunk"], retention: Retention
) -> Float[np.ndarray, "layers heads chunk"]:
    """Stride 1, half a kernel of border on both sides, the result as long as the chunk."""
    length = scores.shape[-1]
    kernel = min(retention.kernel, length)
    if retention.pooling == "none" or kernel <= 1:
        return scores
    border = -np.inf if retention.pooling == "maxpool" else 0.0
    padded = np.pad(scores, ((0, 0), (0, 0), (kernel // 2,) * 2), constant_values=border)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)[:, :, :length]
    return windows.max(axis=-1) if retention.pooling == "maxpool" else windows.mean(axis=-1)


def _reduced(
    scores: Float[np.ndarray, "layers heads chunk"], kv_heads: int, retention: Retention
) -> Float[np.ndarray, "... chunk"]:
    reductions = {"sum": np.sum, "mean": np.mean, "max": np.max}
    depth = len(scores)
    count = min(retention.layers, depth) if retention.layers and retention.layer_mode != "all" else depth
    start = depth - count if retention.layer_mode == "last" else 0
    scores = scores[start : start + count]
    if not retention.per_head:
        by_layer = reductions[retention.head_reduce](scores, axis=1)
        return reductions[retention.layer_reduce](by_layer, axis=0)
    grouped = scores.reshape(count, kv_heads, -1, scores.shape[-1]).mean(axis=2)
    inside = np.arange(depth) - start
    return grouped[np.where((inside >= 0) & (inside < count), inside, 0)]


class Layout(NamedTuple):
    """Where chunks and query stand; `size` is the nominal chunk length, `indices` are the selected chunks."""

    prefix: int
    size: int
    indices: list[int]
    chunk_positions: Literal["reuse", "continuous", "absolute"]
    query_positions: Literal["after_reused_window", "after_selected_chunks", "after_cache"]

    def chunk_start(self, i: int) -> int:
        """Of the `i`-th selected chunk."""
        return (
            self.prefix
            + self.size * {"reuse": 0, "continuous": i, "absolute": self.indices[i]}[self.chunk_positions]
        )

    def query_start(self, used: Int[np.ndarray, "rows"]) -> int:
        """`used` are the positions of the cache in front."""
        if self.query_positions == "after_cache":
            return int(used.max(initial=-1)) + 1
        count = len(self.indices) if self.query_positions == "after_selected_chunks" else 1
        return self.prefix + self.size * count

    def rows(self, kept: list[Rows]) -> Int[np.ndarray, "rows"]:
        """Positions of prefix and kept rows: a token's own, or compact ones where rows are kept per head."""
        parts = [np.arange(self.prefix)]
        for i, rows in enumerate(kept):
            parts.append(self.chunk_start(i) + (np.arange(rows.shape[-1]) if rows.ndim > 1 else rows))
        return np.concatenate(parts)


class Forward(NamedTuple):
    """Tokens of a forward, and the positions of the cache in front of them and of themselves."""

    ids: Tokens
    positions: Int[np.ndarray, "keys"]


class Built(NamedTuple):
    """A cache: prefix and chunks, with query and masks where the mode puts them into one forward."""

    cache: Cache
    positions: Int[np.ndarray, "rows"]
    forwards: list[Forward]
    query_start: int
    query_logits: Float[np.ndarray, "vocab"] | None


def build_whole(
    model: Model,
    prefix: Tokens,
    chunks: list[Tokens],
    kept: list[Rows],
    query: Tokens,
    masks: Tokens,
    layout: Layout,
) -> Built:
    """One forward in which everything sees everything: "full_prompt_mask"; "full_prompt_query" without masks.

    Tokens dropped for all heads are not in it. Where rows are kept per head, whole chunks are in it, and rows
    are gathered afterwards.
    """
    whole = [np.arange(len(c)) if rows.ndim > 1 else rows for c, rows in zip(chunks, kept, strict=True)]
    used = layout.rows(whole)
    tail = np.concatenate([query, masks])
    ids = np.concatenate([prefix, *(c[rows] for c, rows in zip(chunks, whole, strict=True)), tail])
    positions = np.concatenate([used, layout.query_start(used) + np.arange(len(tail))])
    out = forward(model, ids, positions)
    forwards = [Forward(ids, positions)]
    parts, end = [out.cache.take(slice(len(prefix)))], len(prefix)
    for rows, present in zip(kept, whole, strict=True):
        part = out.cache.take(slice(end, end + len(present)))
        parts.append(part.take_per_head(rows) if rows.ndim > 1 else part)
        end += len(present)
    used = layout.rows(kept)
    start = layout.query_start(used)
    positions = np.concatenate([used, start + np.arange(len(tail))])
    cache = joined([*parts, out.cache.take(slice(end, None))])
    return Built(cache, positions, forwards, start, out.logits[-len(masks) - 1])


def build_parts(
    model: Model,
    prefix: Tokens,
    chunks: list[Tokens],
    kept: list[Rows],
    window: Tokens,
    mask: TokenMask,
    layout: Layout,
    alone: bool = False,
) -> Built:
    """The prefix, and every chunk by itself: "chunk_query", or "chunk_only" with `alone`.

    `alone` without prefix, window and mask. Else `window` stands behind each chunk as if that were the first.
    """
    front = Forward(prefix, np.arange(len(prefix)))
    head = forward(model, *front).cache
    parts, forwards = [head], [front]
    for i, (chunk, rows) in enumerate(zip(chunks, kept, strict=True)):
        places = layout.chunk_start(i) + np.arange(len(chunk))
        if alone:
            one, seen, before = Forward(chunk, places), None, None
        else:
            behind = layout.prefix + layout.size + np.arange(len(window))
            one = Forward(
                np.concatenate([chunk, window]), np.concatenate([np.arange(len(prefix)), places, behind])
            )
            seen, before = token_mask(mask, len(prefix), len(chunk), len(window))[len(prefix) :], head
        forwards.append(one)
        cache = forward(model, *one, mask=seen, cache=before).cache
        start = 0 if alone else len(prefix)
        part = cache.take(slice(start, start + len(chunk)))
        parts.append(part.take_per_head(rows) if rows.ndim > 1 else part.take(rows))
    used = layout.rows(kept)
    return Built(joined(parts), used, forwards, layout.query_start(used), None)


def prefill_query(
    model: Model, built: Built, query: Tokens
) -> tuple[Cache, Int[np.ndarray, "rows"], Float[np.ndarray, "vocab"]]:
    """The cache with the query behind it, all positions, and the logits of the query's last row."""
    positions = np.concatenate([built.positions, built.query_start + np.arange(len(query))])
    out = forward(model, query, positions, cache=built.cache)
    return out.cache, positions, out.logits[-1]
