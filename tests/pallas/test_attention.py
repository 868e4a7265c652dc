"""Packed attention against a float64 oracle that loops over rows and heads."""

import functools
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.pallas.attention import AttentionOutput, attention, merge
from jdllm.pallas.attention.reference import attention_reference
from jdllm.pallas.attention.xla import attention_xla
from tests.pallas.jaxprs import largest_intermediate

ROWS = 50
BLOCK = 16
SCALE = 0.3


class Inputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def inputs(rows: int, keys: int, heads: int, kv_heads: int, head_dim: int = 8) -> Inputs:
    rng = np.random.default_rng(rows + 7 * keys + 31 * heads + 101 * kv_heads)
    shapes = ((rows, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, head_dim))
    return Inputs(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))


def oracle(x: Inputs, start: np.ndarray, end: np.ndarray, scale: float = SCALE) -> AttentionOutput:
    q, k, v = (np.asarray(a, np.float64) for a in x)
    rows, heads, _ = q.shape
    o, m, total = np.zeros(q.shape), np.full((rows, heads), -np.inf), np.zeros((rows, heads))
    for row in range(rows):
        for head in range(heads):
            if start[row] >= end[row]:
                continue
            seen = slice(start[row], end[row])
            kv_head = head * k.shape[1] // heads
            scores = scale * k[seen, kv_head] @ q[row, head]
            m[row, head] = scores.max()
            p = np.exp(scores - m[row, head])
            total[row, head] = p.sum()
            o[row, head] = p @ v[seen, kv_head] / p.sum()
    return AttentionOutput(o, m, total)  # pyright: ignore[reportArgumentType]


def segment_bounds(lengths: list[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Key ranges of packed segments; rows beyond the last segment are padding."""
    start, end = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    at = 0
    for length in lengths:
        start[at : at + length], end[at : at + length] = at, at + length
        at += length
    return start, end


def ranges(kind: str, rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    row = np.arange(rows, dtype=np.int32)
    zero = np.zeros_like(row)
    return {
        "full": (zero, zero + keys),
        "causal": (zero, np.minimum(row + 1, keys)),
        "block_causal": (zero, np.minimum((row // 6 + 1) * 6, keys)),
        "sliding": (np.clip(row - 4, 0, keys), np.clip(row + 5, 0, keys)),
        "backward": (np.clip(row, 0, keys), zero + keys),
        "packed": segment_bounds([3, 14, 1, 20, 7], rows),
        "one_key": (np.minimum(row, keys - 1), np.minimum(row, keys - 1) + 1),
        "all_empty": (zero + 5, zero + 5),
    }[kind]


KINDS = ("full", "causal", "block_causal", "sliding", "backward", "packed", "one_key", "all_empty")


def close(actual: AttentionOutput, expected: AttentionOutput, tolerance: float = 1e-5) -> None:
    for name, a, e in zip(AttentionOutput._fields, actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), e, rtol=tolerance, atol=tolerance, err_msg=name)


merged = jax.jit(merge)


@functools.cache
def compiled(form: str, block: int):
    if form == "reference":
        return jax.jit(functools.partial(attention_reference, scale=SCALE))
    return jax.jit(functools.partial(attention_xla, scale=SCALE, block=block))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["xla", "reference"])
def test_equals_float64(form: str, kind: str):
    x = inputs(ROWS, ROWS, 4, 2)
    bounds = ranges(kind, ROWS, ROWS)
    close(compiled(form, BLOCK)(*x, *bounds), oracle(x, *bounds))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (6, 1)])
def test_query_heads_share_key_heads_in_order(heads: int, kv_heads: int):
    x = inputs(20, 20, heads, kv_heads)
    bounds = ranges("causal", 20, 20)
    close(compiled("xla", 8)(*x, *bounds), oracle(x, *bounds))


@pytest.mark.parametrize(("rows", "keys"), [(1, 37), (16, 17), (33, 5), (48, 31)])
def test_any_number_of_rows_and_keys(rows: int, keys: int):
    x = inputs(rows, keys, 2, 1)
    for kind in ("full", "sliding", "causal"):
        bounds = ranges(kind, rows, keys)
        close(compiled("xla", BLOCK)(*x, *bounds), oracle(x, *bounds))


def test_empty_ranges_give_nothing_and_disturb_nobody():
    x = inputs(ROWS, ROWS, 4, 2)
    start, end = ranges("packed", ROWS, ROWS)
    empty = start == end
    assert empty.any()
    o, m, total = (np.asarray(a) for a in compiled("xla", BLOCK)(*x, start, end))
    assert (o[empty] == 0).all()
    assert np.isneginf(m[empty]).all()
    assert (total[empty] == 0).all()
    x.q[empty] = np.nan
    dirty = compiled("xla", BLOCK)(*x, start, end)
    np.testing.assert_array_equal(np.asarray(dirty.o)[~empty], o[~empty])


def test_keys_outside_the_range_do_not_matter():
    x = inputs(ROWS, ROWS, 4, 2)
    start, end = segment_bounds([11, 17, 22], ROWS)
    clean = compiled("xla", BLOCK)(*x, start, end)
    x.k[28:], x.v[28:] = 1e4, 1e4
    dirty = compiled("xla", BLOCK)(*x, start, end)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:28], np.asarray(b)[:28])


def test_large_scores_do_not_overflow():
    x = inputs(20, 20, 2, 2)
    x.q[:] *= 1000
    bounds = ranges("full", 20, 20)
    actual = compiled("xla", 8)(*x, *bounds)
    expected = oracle(x, *bounds)
    np.testing.assert_allclose(actual.m, expected.m, rtol=1e-6)
    np.testing.assert_allclose(actual.o, expected.o, atol=1e-3)  # scores of 1000 have an f32 ulp of 6e-5


@pytest.mark.parametrize("form", ["xla", "reference"])
def test_bfloat16(form: str):
    x = inputs(ROWS, ROWS, 4, 2)
    rounded = Inputs(*(np.asarray(jnp.asarray(a, jnp.bfloat16)) for a in x))
    bounds = ranges("packed", ROWS, ROWS)
    actual = compiled(form, BLOCK)(*rounded, *bounds)
    expected = oracle(rounded, *bounds)
    assert actual.o.dtype == jnp.bfloat16
    assert actual.m.dtype == actual.l.dtype == jnp.float32
    np.testing.assert_allclose(actual.m, expected.m, rtol=1e-5)
    np.testing.assert_allclose(actual.l, expected.l, rtol=1e-5)
    # weights and output are each rounded to 8 bits
    bound = 2**-8 * np.abs(np.asarray(rounded.v, np.float64)).max()
    np.testing.assert_allclose(np.asarray(actual.o, np.float64), expected.o, atol=bound)


@given(st.data())
def test_ragged_segments(data: st.DataObject):
    x = inputs(ROWS, ROWS, 4, 2)
    cuts = sorted(data.draw(st.lists(st.integers(0, ROWS), max_size=8)))
    lengths = np.diff([0, *cuts]).tolist()
    bounds = segment_bounds(lengths, ROWS)
    close(compiled("xla", BLOCK)(*x, *bounds), oracle(x, *bounds))


@given(st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)), min_size=ROWS, max_size=ROWS))
def test_any_ranges(pairs: list[tuple[int, int]]):
    x = inputs(ROWS, ROWS, 4, 2)
    bounds = np.sort(np.array(pairs, np.int32), axis=1)
    close(compiled("xla", BLOCK)(*x, bounds[:, 0], bounds[:, 1]), oracle(x, bounds[:, 0], bounds[:, 1]))


@pytest.mark.slow
@given(st.lists(st.integers(0, ROWS), max_size=3), st.sampled_from(KINDS))
def test_merge_of_disjoint_keys_is_the_whole(cuts: list[int], kind: str):
    x = inputs(ROWS, ROWS, 4, 2)
    start, end = ranges(kind, ROWS, ROWS)
    edges = [0, *sorted(cuts), ROWS]
    parts = [
        compiled("xla", BLOCK)(*x, *(np.clip(b, low, high) for b in (start, end)))
        for low, high in pairwise(edges)
    ]
    close(merged(parts), oracle(x, start, end))


def test_merge_of_separate_key_arrays():
    x = inputs(ROWS, ROWS, 4, 2)
    start, end = ranges("full", ROWS, ROWS)
    parts = [
        compiled("xla", BLOCK)(x.q, x.k[part], x.v[part], start, np.full_like(end, part.stop - part.start))
        for part in (slice(0, 20), slice(20, 50))
    ]
    close(merged(parts), oracle(x, start, end))


def test_merge_of_nothing_is_nothing():
    x = inputs(ROWS, ROWS, 4, 2)
    empty = compiled("xla", BLOCK)(*x, *ranges("all_empty", ROWS, ROWS))
    close(merged([empty, empty]), empty)


def test_merge_keeps_the_dtype_of_the_output():
    x = Inputs(*(jnp.asarray(a, jnp.bfloat16) for a in inputs(ROWS, ROWS, 4, 2)))  # pyright: ignore
    part = compiled("xla", BLOCK)(*x, *ranges("full", ROWS, ROWS))
    assert merged([part, part]).o.dtype == jnp.bfloat16


def test_heads_that_do_not_divide_are_refused():
    x = inputs(4, 4, 3, 2)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2 key-value heads"):
        attention(*map(jnp.asarray, x), *map(jnp.asarray, ranges("full", 4, 4)), scale=SCALE)


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_entry_point(implementation):
    x = inputs(20, 20, 4, 2)
    bounds = ranges("causal", 20, 20)
    run = jax.jit(functools.partial(attention, scale=SCALE, implementation=implementation))
    close(run(*x, *bounds), oracle(x, *bounds))


class TestMemory:
    """Neither the scores of all rows nor anything else of rows x rows elements ever exists."""

    rows, heads = 4096, 4

    def largest(self, implementation) -> int:
        def run(q, k, v, start, end):
            return attention(q, k, v, start, end, scale=SCALE, implementation=implementation)

        wide = jax.ShapeDtypeStruct((self.rows, self.heads, 16), jnp.float32)
        bounds = jax.ShapeDtypeStruct((self.rows,), jnp.int32)
        return largest_intermediate(run, wide, wide, wide, bounds, bounds)

    @pytest.mark.parametrize("implementation", ["xla", None])
    def test_scores_exist_for_a_block_at_a_time(self, implementation):
        assert self.largest(implementation) <= self.heads * 512 * 512
        assert self.largest(implementation) < self.rows * self.rows

    def test_the_dense_form_would_be_noticed(self):
        assert self.largest("reference") >= self.heads * self.rows * self.rows

    def test_compiled_temporaries_are_smaller_than_the_scores(self):
        wide = jax.ShapeDtypeStruct((self.rows, self.heads, 16), jnp.float32)
        bounds = jax.ShapeDtypeStruct((self.rows,), jnp.int32)
        run = jax.jit(functools.partial(attention, scale=SCALE))
        analysis = run.lower(wide, wide, wide, bounds, bounds).compile().memory_analysis()
        assert analysis is not None
        assert analysis.temp_size_in_bytes < self.rows * self.rows * 4
