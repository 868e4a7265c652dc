"""Operands of Split-S attention, and what float64 makes of them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.pallas.attention import AttentionOutput
from jdllm.pallas.split_attention import FRESH_UNIT, PageTable, with_fresh_rows
from jdllm.stored_rows import Float8Rows
from tests.rounding import rounded_as_stored

BF16_RELATIVE = 4e-3

PerRequest = Sequence[np.ndarray] | np.ndarray


class Case(NamedTuple):
    """One call; rows of the pool that are not live hold a large number."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    table: PageTable
    layer: int
    scale: float


def case(
    counts: list[list[int]],
    *,
    queries: int = 8,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    page_rows: int = 64,
    layers: int = 2,
    dtype=jnp.bfloat16,
    spare: int = 2,
    seed: int = 0,
) -> Case:
    """`counts` has the live rows of each request's pages; pages are scattered over the pool."""
    rng = np.random.default_rng(seed)
    valid = np.array([n for request in counts for n in request], np.int32)
    pages = rng.permutation(len(valid) + 1).astype(np.int32)[: len(valid)]
    shape = (layers, len(valid) + 1, kv_heads, page_rows, head_dim)
    k, v = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    live = np.zeros((shape[1], page_rows), bool)
    live[pages] = np.arange(page_rows) < valid[:, None]
    for pool in (k, v):
        pool[:, ~live.any(axis=1)] = 1000.0
        np.copyto(pool, 1000.0, where=~live[None, :, None, :, None])
    q = rng.normal(size=(len(counts), queries, heads, head_dim))
    # Entries beyond the last request's are there, and nobody owns them.
    table = PageTable(
        np.concatenate([pages, np.full(spare, pages[0] if len(pages) else 0, np.int32)]),
        np.concatenate([valid, np.full(spare, page_rows, np.int32)]),
        np.cumsum([0, *map(len, counts)]).astype(np.int32),
    )
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return Case(q, k, v, table, layers - 1, head_dim**-0.5)


def rounded(c: Case) -> tuple[Case, tuple[Float8Rows, Float8Rows]]:
    """The case with the keys and values that a pool in 8 bits stands for, and that pool. Rows that are not
    live have scales beside those of all others."""
    plain = [rounded_as_stored(np.asarray(pool, np.float32)) for pool in (c.k, c.v)]
    k, v = (Float8Rows.of(pool) for pool in (c.k, c.v))
    return c._replace(k=jnp.asarray(plain[0], c.q.dtype), v=jnp.asarray(plain[1], c.q.dtype)), (k, v)


def with_fresh(
    c: Case, counts: list[int], unit: int = FRESH_UNIT
) -> tuple[Case, tuple[jax.Array, jax.Array], tuple[PerRequest, PerRequest]]:
    """The case with `counts` fresh rows for its requests, those rows, and what each request sees of them.

    Those of each begin at a multiple of `unit`; of less than `FRESH_UNIT` there are no more. No rows follow
    the last request's; those between two requests hold a large number.
    """
    rng = np.random.default_rng(1)
    kv_heads, page_rows, head_dim = c.k.shape[2:]
    start = np.cumsum([0, *(-(-n // unit) * unit for n in counts)])
    fresh = np.full((2, start[-1], kv_heads, head_dim), 1000.0)
    for at, n in zip(start, counts, strict=False):
        fresh[:, at : at + n] = rng.normal(size=(2, n, kv_heads, head_dim))
    k, v = (jnp.asarray(x, c.k.dtype) for x in fresh)
    seen = [
        [np.asarray(x, np.float64)[at : at + n] for at, n in zip(start, counts, strict=False)] for x in (k, v)
    ]
    table = with_fresh_rows(c.table, start[:-1], np.array(counts), page_rows, unit=unit)
    return c._replace(table=table), (k, v), (seen[0], seen[1])


def keys_of(c: Case, request: int) -> tuple[np.ndarray, np.ndarray]:
    """The live keys and values of a request, one page after the other: `[keys, kv_heads, head_dim]`."""
    pages, valid, first = (np.asarray(x) for x in c.table)
    owned = range(first[request], first[request + 1])

    def gather(pool: jax.Array) -> np.ndarray:
        layer = np.asarray(pool[c.layer], np.float64)
        rows = [np.moveaxis(layer[pages[e], :, : valid[e]], 0, 1) for e in owned]
        return np.concatenate([np.zeros((0, layer.shape[1], layer.shape[3])), *rows])

    return gather(c.k), gather(c.v)


def oracle(c: Case, extra: tuple[PerRequest, PerRequest] | None = None) -> AttentionOutput:
    """Softmax attention in float64; `extra`: more keys and values of each request."""
    q = np.asarray(c.q, np.float64)
    requests, _, heads, _ = q.shape
    o, m, total = np.zeros(q.shape), np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3])
    for r in range(requests):
        k, v = keys_of(c, r)
        if extra is not None:
            k, v = np.concatenate([k, extra[0][r]]), np.concatenate([v, extra[1][r]])
        if not len(k):
            continue
        for h in range(heads):
            g = h // (heads // k.shape[1])
            scores = c.scale * q[r, :, h] @ k[:, g].T
            m[r, :, h] = scores.max(axis=1)
            p = np.exp(scores - m[r, :, h, None])
            total[r, :, h] = p.sum(axis=1)
            o[r, :, h] = p @ v[:, g] / total[r, :, h, None]
    return AttentionOutput(*(jnp.asarray(x, jnp.float32) for x in (o, m, total)))


def check(actual: AttentionOutput, expected: AttentionOutput, tolerance: float) -> None:
    """`tolerance` is relative to values of size 1 for `o`; the residuals are f32 sums of rounded products."""
    np.testing.assert_allclose(np.asarray(actual.o, np.float64), expected.o, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(actual.m, expected.m, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(actual.l, expected.l, rtol=1e-3)
    assert actual.m.dtype == actual.l.dtype == jnp.float32


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference in that of what is expected."""
    expected = np.asarray(expected, np.float64)
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))
