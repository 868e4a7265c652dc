import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.execution.paged.selection import USUAL_BLOCK, USUAL_WIDTH, Selection, slots_of, sources, store
from jdllm.pallas.split_attention import PageTable

HEAD_DIM, PAGE_ROWS = 8, 4
GROUPS = [(4, 2), (3, 3), (4, 1)]


@functools.partial(jax.jit, static_argnames=("scored", "usual"))
def sources_of(q, k, selection, table, scored, usual):
    return sources(q, k, selection, slots_of(selection, table, PAGE_ROWS), scored=scored, usual=usual)


def slow(*values: object):
    """A case for the longer lane: each has shapes of its own to compile."""
    return pytest.param(*values, marks=pytest.mark.slow)


@dataclasses.dataclass(frozen=True)
class Segment:
    """One request's rows: queries and keys `[rows, heads, head_dim]`, and rows of its own by number."""

    q: np.ndarray
    k: np.ndarray
    block: np.ndarray
    candidates: np.ndarray
    keep: int
    scored: bool
    per_head: bool
    width: int

    def order(self) -> np.ndarray:
        """Rows `[candidates, kv_heads]` in the order of the definition, one score after another in f64."""
        n, kv_heads = len(self.candidates), self.k.shape[1]
        if not self.scored:
            return np.repeat(self.candidates[:, None], kv_heads, axis=1)
        order = np.zeros((n, kv_heads), int)
        for head, pooled in enumerate(self.pooled()):
            order[:, head] = self.candidates[sorted(range(n), key=lambda j: (-pooled[j], j))]
        return order

    def pooled(self) -> np.ndarray:
        """Pooled scores `[kv_heads, candidates]`."""
        q, k = self.q.astype(np.float64), self.k.astype(np.float64)
        heads, kv_heads = q.shape[1], k.shape[1]
        mean = q[self.block].sum(axis=0) / max(len(self.block), 1)
        pooled = np.zeros((kv_heads, len(self.candidates)))
        for g in range(kv_heads):
            scores = []
            for row in self.candidates:
                products = [mean[h] @ k[row, h // (heads // kv_heads)] for h in range(heads)]
                own = products[g * heads // kv_heads : (g + 1) * heads // kv_heads]
                scores.append(max(own) if self.per_head else sum(products) / heads)
            for j in range(len(scores)):
                pooled[g, j] = max(scores[max(j - self.width // 2, 0) : j + self.width // 2 + 1])
        return pooled


def random_segment(
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    kind: str,
    block_rows: int | None,
    **fixed: bool | int,
) -> Segment:
    """A segment of any policy, with a block of so many rows, or else of any few.

    `kind`: "ties" has small integers, of which f32 makes exact scores; "near" has keys that differ by a few
    units in the last place, so that rounding decides their order; "normal" neither.
    """
    if block_rows is None:
        block_rows = int(rng.choice([0, 1, 2, 4, 8, 16]) if kind == "ties" else rng.integers(1, 20))
    rows = block_rows + int(rng.integers(0, 25))
    start = int(rng.integers(0, rows - block_rows + 1))
    block = np.arange(start, start + block_rows)
    candidates = np.setdiff1d(np.arange(rows), block)
    if rng.random() < 0.2:
        candidates = candidates[: len(candidates) // 2]
    shape_q, shape_k = (rows, heads, HEAD_DIM), (rows, kv_heads, HEAD_DIM)
    if kind == "ties":
        q, k = rng.integers(-2, 3, shape_q), rng.integers(-2, 3, shape_k)
    else:
        q, k = rng.normal(size=shape_q), rng.normal(size=shape_k)
    if kind == "near":
        k = k[:1] * (1 + rng.integers(-2, 3, shape_k) * 2.0**-23)
    policy = {
        "keep": int(rng.choice([0, len(candidates), len(candidates) // 2])),
        "scored": bool(rng.random() < 0.7),
        "per_head": bool(rng.random() < 0.5),
        "width": int(rng.choice([1, 3, 5])),
    }
    arrays = (q.astype(np.float32), k.astype(np.float32), block, candidates)
    return Segment(*arrays, **(policy | fixed))  # pyright: ignore[reportArgumentType]


def random_batch(
    seed: int,
    kind: str,
    heads: int = 4,
    kv_heads: int = 2,
    segments: int = 6,
    block_rows: int | None = None,
    **fixed,
):
    rng = np.random.default_rng(seed)
    return [random_segment(rng, heads, kv_heads, kind, block_rows, **fixed) for _ in range(segments)]


def pack(
    segments: Sequence[Segment], padding: int = 0, dtype=np.float32
) -> tuple[jax.Array, jax.Array, Selection]:
    """One segment after the other; padding rows are NaN, and padding candidates point at the last row."""
    bases = np.cumsum([0, *(len(s.q) for s in segments)])
    rows = bases[-1] + padding
    q, k = (
        np.concatenate([*parts, np.full((padding, *parts[0].shape[1:]), np.nan, np.float32)])
        for parts in ([s.q for s in segments], [s.k for s in segments])
    )
    block_first = [
        base + (s.block[0] if len(s.block) else 0) for base, s in zip(bases, segments, strict=False)
    ]
    candidates = [bases[i] + s.candidates for i, s in enumerate(segments)]
    owners = np.repeat(np.arange(len(segments)), [len(c) for c in candidates])
    selection = Selection(
        np.array(block_first, np.int32),
        np.array([len(s.block) for s in segments], np.int32),
        np.concatenate([*candidates, np.full(padding, rows - 1)]).astype(np.int32),
        np.concatenate([owners, np.full(padding, len(segments))]).astype(np.int32),
        np.array([s.keep for s in segments], np.int32),
        np.array([s.scored for s in segments]),
        np.array([s.per_head for s in segments]),
        np.array([s.width for s in segments], np.int32),
    )
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype), selection


def scored_of(segments: Sequence[Segment]) -> bool:
    return any(s.scored for s in segments)


def table_for(pages: np.ndarray, counts: np.ndarray) -> PageTable:
    """So many of the pages for each segment, one after another; no refresh reads how many rows are live."""
    first = np.cumsum([0, *counts]).astype(np.int32)
    return PageTable(pages.astype(np.int32), np.zeros(len(pages), np.int32), first)


def order_by_segment(
    segments: Sequence[Segment], padding: int = 0, dtype=np.float32, usual: bool | None = None
) -> list[np.ndarray]:
    """What `sources` says of each segment where all are kept: its rows `[candidates, kv_heads]`.

    `usual`: what it is told of the segments, by default the truth.
    """
    if usual is None:
        usual = all(len(s.block) <= USUAL_BLOCK and s.width <= USUAL_WIDTH for s in segments if s.scored)
    q, k, selection = pack(segments, padding, dtype)
    keep = np.array([len(s.candidates) for s in segments], np.int32)
    counts = -(-keep // PAGE_ROWS)
    table = table_for(1 + np.arange(counts.sum()), counts)
    got = sources_of(q, k, selection._replace(keep=keep), table, scored_of(segments), usual)
    assert got.dtype == jnp.int32
    assert got.shape[1:] in ((k.shape[1], PAGE_ROWS), (1, PAGE_ROWS))
    rows = np.broadcast_to(got, (len(got), k.shape[1], PAGE_ROWS)).swapaxes(1, 2)
    bases = np.cumsum([0, *(len(s.q) for s in segments)])
    return [
        rows[table.first[i] : table.first[i + 1]].reshape(-1, k.shape[1])[: keep[i]] - bases[i]
        for i in range(len(segments))
    ]


def assert_order(segments: Sequence[Segment], padding: int = 0) -> None:
    for got, segment in zip(order_by_segment(segments, padding), segments, strict=True):
        np.testing.assert_array_equal(got, segment.order())


@pytest.mark.parametrize("padding", [slow(0), 7])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_the_order_with_ties_is_the_definition(heads, kv_heads, padding):
    segments = random_batch(heads + 10 * kv_heads, "ties", heads, kv_heads)
    shared = [len(s.candidates) - len(np.unique(s.pooled()[0])) for s in segments if s.scored]
    assert sum(shared) > 5, "the case has no ties"
    assert_order(segments, padding)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), slow(3, 3), slow(4, 1)])
def test_the_order_of_any_scores_is_the_definition(heads, kv_heads):
    segments = random_batch(heads + 10 * kv_heads, "normal", heads, kv_heads)
    for s in segments:
        for scores in s.pooled():
            gaps = np.diff(np.unique(scores)).tolist()
            assert min(gaps, default=1) > 1e-5, "f32 may order these scores in another way"
    assert_order(segments, padding=3)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("width", [1, 3, 5, slow(15), 1001])
@pytest.mark.slow
def test_each_policy_alone_in_a_batch(width, per_head):
    assert_order(random_batch(width, "ties", scored=True, per_head=per_head, width=width))


def test_sixteen_bit_rows_are_scored_in_f32():
    segments = random_batch(3, "normal", scored=True)
    rounded = [
        dataclasses.replace(
            s, **{name: np.asarray(jnp.bfloat16(getattr(s, name)), np.float32) for name in "qk"}
        )
        for s in segments
    ]
    for got, segment in zip(order_by_segment(segments, dtype=jnp.bfloat16), rounded, strict=True):
        np.testing.assert_array_equal(got, segment.order())


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
@pytest.mark.slow
def test_company_changes_no_order(seed):
    """Rounding decides the order of these candidates, so that any other order of addition would show."""
    segments = random_batch(seed, "near", scored=True)
    together = order_by_segment(segments)
    assert any((got != s.order()).any() for got, s in zip(together, segments, strict=True))
    order = np.random.default_rng(seed).permutation(len(segments))
    permuted = order_by_segment([segments[i] for i in order], padding=5)
    for place, i in enumerate(order):
        np.testing.assert_array_equal(permuted[place], together[i])
    np.testing.assert_array_equal(order_by_segment(segments[-1:])[0], together[-1])


def test_long_blocks_are_scored_by_all_of_their_rows():
    longer = random_batch(4, "ties", segments=2, block_rows=4 * USUAL_BLOCK, scored=True)
    segments = [*longer, *random_batch(5, "ties", segments=2, scored=True)]
    shortened = [dataclasses.replace(s, block=s.block[:USUAL_BLOCK]) for s in longer]
    assert any((a.order() != b.order()).any() for a, b in zip(longer, shortened, strict=True))
    assert_order(segments, padding=3)


@pytest.mark.slow
def test_usual_segments_have_the_same_order_where_others_could_be():
    segments = random_batch(6, "near", scored=True, width=USUAL_WIDTH)
    for usual, general in zip(*(order_by_segment(segments, usual=x) for x in (True, False)), strict=True):
        np.testing.assert_array_equal(usual, general)


@pytest.mark.parametrize("scored_too", [False, True])
def test_segments_that_are_not_scored_keep_their_order_whatever_their_rows_hold(scored_too):
    segments = [
        dataclasses.replace(s, q=np.full_like(s.q, np.nan), k=np.full_like(s.k, np.nan))
        for s in random_batch(1, "normal", scored=False)
    ]
    if scored_too:
        segments[1:1] = random_batch(2, "ties", segments=1, scored=True)
    assert_order(segments, padding=4)


@pytest.mark.slow
def test_rows_are_read_only_where_a_segment_is_scored():
    q, k, selection = pack(random_batch(0, "normal", segments=2, scored=False))
    slots = slots_of(selection, table_for(np.arange(9), np.array([4, 4])), PAGE_ROWS)
    jaxpr = jax.make_jaxpr(functools.partial(sources, scored=False))(q, k, selection, slots).jaxpr
    assert not jaxpr.eqns


def test_a_device_does_not_wait_for_the_host():
    """In no layer of a refresh, but for blocks that may be long."""
    segments = random_batch(0, "normal", segments=2, scored=True)
    q, k, selection = pack(segments)
    table = table_for(np.arange(9), np.array([4, 4]))
    pool = jnp.zeros((1, 9, k.shape[1], PAGE_ROWS, HEAD_DIM))

    def text(usual: bool) -> str:
        def refresh(pool, q, k, selection, table):
            slots = slots_of(selection, table, PAGE_ROWS)
            source = sources(q, k, selection, slots, scored=scored_of(segments), usual=usual)
            return slots, store(pool, pool, 0, k, k, slots.page, source)

        return str(jax.make_jaxpr(refresh)(pool, q, k, selection, table))

    assert "cond[" not in text(usual=True)
    assert "while[" not in text(usual=True)
    assert text(usual=False).count("while[") == 1


def page_table(rng: np.random.Generator, keep: np.ndarray) -> tuple[PageTable, int]:
    """Pages for so many rows of each segment and a few more, scattered over a pool of how many pages."""
    counts = -(-keep // PAGE_ROWS) + rng.integers(0, 3, len(keep))
    # Entries beyond the last segment's are there, and nobody owns them.
    pages = 1 + rng.permutation(counts.sum() + 3)
    return table_for(pages[:-1], counts), len(pages) + 1


@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_stored_rows_are_those_of_a_model_with_lists(seed):
    rng = np.random.default_rng(seed)
    segments = random_batch(seed, "ties")
    q, k, selection = pack(segments, padding=int(rng.integers(0, 6)))
    v = jnp.where(jnp.isnan(k), jnp.nan, jnp.asarray(rng.normal(size=k.shape), jnp.float32))
    table, pages = page_table(rng, np.asarray(selection.keep))
    pools = [rng.normal(size=(2, pages, k.shape[1], PAGE_ROWS, HEAD_DIM)).astype(np.float32) for _ in "kv"]

    @jax.jit
    def refresh(pool_k, pool_v, layer, q, k, v, selection, table):
        slots = slots_of(selection, table, PAGE_ROWS)
        source = sources(q, k, selection, slots, scored=scored_of(segments))
        return store(pool_k, pool_v, layer, k, v, slots.page, source), slots.page

    (got_k, got_v), page = refresh(*pools, 1, q, k, v, selection, table)
    assert page.dtype == jnp.int32

    expected = [pool.copy() for pool in pools]
    stored, free = np.zeros(len(table.pages), int), np.zeros((pages, PAGE_ROWS), bool)
    base = 0
    for i, s in enumerate(segments):
        kept = s.order()[: s.keep]
        for at in range(s.keep):
            entry = table.first[i] + at // PAGE_ROWS
            stored[entry] = table.pages[entry]
            for pool, rows in zip(expected, (k, v), strict=True):
                for head in range(k.shape[1]):
                    pool[1, stored[entry], head, at % PAGE_ROWS] = rows[base + kept[at, head], head]
        if s.keep % PAGE_ROWS:
            free[stored[table.first[i] + s.keep // PAGE_ROWS], s.keep % PAGE_ROWS :] = True
        base += len(s.q)
    np.testing.assert_array_equal(np.where(page < pages, page, 0), stored)
    assert len(set(page.tolist())) == len(page)
    for got, pool in zip((got_k, got_v), expected, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got[0], pool[0])
        got_rows, rows = (np.asarray(x[1]).swapaxes(1, 2)[~free] for x in (got, pool))
        np.testing.assert_array_equal(got_rows, rows)


@pytest.mark.slow
def test_pages_are_untouched_where_no_segment_stores():
    segments = [dataclasses.replace(s, keep=0) for s in random_batch(0, "normal")]
    q, k, selection = pack(segments, padding=2)
    table = table_for(np.arange(1, 12), np.array([1, 0, 2, 1, 2, 1]))
    pool = jnp.ones((1, 12, k.shape[1], PAGE_ROWS, HEAD_DIM))
    slots = slots_of(selection, table, PAGE_ROWS)
    source = sources(q, k, selection, slots, scored=scored_of(segments))
    for got in store(pool, pool, 0, k, k, slots.page, source):
        np.testing.assert_array_equal(got, pool)


@pytest.mark.slow
def test_stored_rows_take_the_type_of_the_pool():
    (segment,) = random_batch(0, "normal", segments=1, scored=False, keep=3)
    _, k, selection = pack([segment])
    pool = jnp.zeros((1, 2, k.shape[1], PAGE_ROWS, HEAD_DIM), jnp.bfloat16)
    slots = slots_of(selection, table_for(np.array([1]), np.array([1])), PAGE_ROWS)
    _, got = store(pool, pool, 0, k, 2 * k, slots.page, slots.source)
    expected = 2 * k[selection.row[:3]].astype(jnp.bfloat16)
    stored = np.asarray(got)[0, 1, :, :3].swapaxes(0, 1)
    np.testing.assert_array_equal(stored, expected)
