import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.models.selection import Scoring, Selection, candidate_ranks, destinations, store
from jdllm.pallas.split_attention import PageTable

HEAD_DIM, PAGE_ROWS = 8, 4
GROUPS = [(4, 2), (3, 3), (4, 1)]

ranks_of = jax.jit(candidate_ranks, static_argnames="scoring")


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

    def ranks(self) -> np.ndarray:
        """Ranks `[candidates, kv_heads]` by the definition, one score after the other in f64."""
        n, kv_heads = len(self.candidates), self.k.shape[1]
        if not self.scored:
            return np.repeat(np.arange(n)[:, None], kv_heads, axis=1)
        ranks = np.zeros((n, kv_heads), int)
        for head, pooled in enumerate(self.pooled()):
            for rank, j in enumerate(sorted(range(n), key=lambda j: (-pooled[j], j))):
                ranks[j, head] = rank
        return ranks

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
    rng: np.random.Generator, heads: int, kv_heads: int, kind: str, **fixed: bool | int
) -> Segment:
    """A segment of any policy.

    `kind`: "ties" has small integers, of which f32 makes exact scores; "near" has keys that differ by a few
    units in the last place, so that rounding decides their order; "normal" neither.
    """
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


def random_batch(seed: int, kind: str, heads: int = 4, kv_heads: int = 2, segments: int = 6, **fixed):
    rng = np.random.default_rng(seed)
    return [random_segment(rng, heads, kv_heads, kind, **fixed) for _ in range(segments)]


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
        np.concatenate([*(np.arange(len(c)) for c in candidates), np.zeros(padding)]).astype(np.int32),
        np.array([s.keep for s in segments], np.int32),
        np.array([s.scored for s in segments]),
        np.array([s.per_head for s in segments]),
        np.array([s.width for s in segments], np.int32),
    )
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype), selection


def scoring_of(segments: Sequence[Segment]) -> Scoring | None:
    """The tightest bounds."""
    if not any(s.scored for s in segments):
        return None
    return Scoring(max(s.width // 2 for s in segments), max(len(s.block) for s in segments))


def ranks_by_segment(segments: Sequence[Segment], padding: int = 0) -> list[np.ndarray]:
    """What `candidate_ranks` says of each segment."""
    q, k, selection = pack(segments, padding)
    ranks = ranks_of(q, k, selection, scoring_of(segments))
    assert ranks.dtype == jnp.int32
    assert ranks.shape == (len(selection.row), k.shape[1])
    counts = np.cumsum([len(s.candidates) for s in segments])
    return np.split(np.asarray(ranks)[: counts[-1]], counts[:-1])


def assert_ranks(segments: Sequence[Segment], padding: int = 0) -> None:
    for got, segment in zip(ranks_by_segment(segments, padding), segments, strict=True):
        np.testing.assert_array_equal(got, segment.ranks())


@pytest.mark.parametrize("padding", [slow(0), 7])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_ranks_with_ties_are_the_definition(heads, kv_heads, padding):
    segments = random_batch(heads + 10 * kv_heads, "ties", heads, kv_heads)
    shared = [len(s.candidates) - len(np.unique(s.pooled()[0])) for s in segments if s.scored]
    assert sum(shared) > 5, "the case has no ties"
    assert_ranks(segments, padding)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), slow(3, 3), slow(4, 1)])
def test_ranks_of_any_scores_are_the_definition(heads, kv_heads):
    segments = random_batch(heads + 10 * kv_heads, "normal", heads, kv_heads)
    for s in segments:
        for scores in s.pooled():
            gaps = np.diff(np.unique(scores)).tolist()
            assert min(gaps, default=1) > 1e-5, "f32 may order these scores in another way"
    assert_ranks(segments, padding=3)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_each_policy_alone_in_a_batch(width, per_head):
    assert_ranks(random_batch(width, "ties", scored=True, per_head=per_head, width=width))


def test_sixteen_bit_rows_are_scored_in_f32():
    segments = random_batch(3, "normal", scored=True)
    rounded = [
        dataclasses.replace(
            s, **{name: np.asarray(jnp.bfloat16(getattr(s, name)), np.float32) for name in "qk"}
        )
        for s in segments
    ]
    q, k, selection = pack(segments, dtype=jnp.bfloat16)
    ranks = ranks_of(q, k, selection, scoring_of(segments))
    np.testing.assert_array_equal(ranks, np.concatenate([s.ranks() for s in rounded]))


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_company_changes_no_rank(seed):
    """Rounding decides the order of these candidates, so that any other order of addition would show."""
    segments = random_batch(seed, "near", scored=True)
    together = ranks_by_segment(segments)
    assert any((got != s.ranks()).any() for got, s in zip(together, segments, strict=True))
    order = np.random.default_rng(seed).permutation(len(segments))
    permuted = ranks_by_segment([segments[i] for i in order], padding=5)
    for place, i in enumerate(order):
        np.testing.assert_array_equal(permuted[place], together[i])
    np.testing.assert_array_equal(ranks_by_segment(segments[-1:])[0], together[-1])


@pytest.mark.parametrize("scored_too", [False, True])
def test_segments_that_are_not_scored_keep_their_order_whatever_their_rows_hold(scored_too):
    segments = [
        dataclasses.replace(s, q=np.full_like(s.q, np.nan), k=np.full_like(s.k, np.nan))
        for s in random_batch(1, "normal", scored=False)
    ]
    if scored_too:
        segments[1:1] = random_batch(2, "ties", segments=1, scored=True)
    assert_ranks(segments, padding=4)


def test_rows_are_read_only_where_a_segment_is_scored():
    batch = pack(random_batch(0, "normal", segments=2, scored=False))
    jaxpr = jax.make_jaxpr(functools.partial(candidate_ranks, scoring=None))(*batch).jaxpr
    assert not [e for e in jaxpr.eqns for rows in jaxpr.invars[:2] if rows in e.invars]


def test_a_device_does_not_wait_for_the_host():
    """Neither a condition nor a loop whose turns the device counts, in any layer of a refresh."""
    segments = random_batch(0, "normal", segments=2, scored=True)
    text = str(
        jax.make_jaxpr(functools.partial(candidate_ranks, scoring=scoring_of(segments)))(*pack(segments))
    )
    assert "scan[" in text
    assert "cond[" not in text
    assert "while[" not in text


def page_table(rng: np.random.Generator, keep: np.ndarray) -> tuple[PageTable, int]:
    """Pages for so many rows of each segment, scattered over a pool; returns how many pages it has."""
    needed = -(-keep // PAGE_ROWS)
    first = np.cumsum([0, *needed]).astype(np.int32)
    pages = 1 + rng.permutation(first[-1] + 3).astype(np.int32)
    # Entries beyond the last segment's are there, and nobody owns them.
    return PageTable(pages[:-1], np.zeros(len(pages) - 1, np.int32), first), len(pages) + 1


@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_stored_rows_are_those_of_a_model_with_lists(seed):
    rng = np.random.default_rng(seed)
    segments = random_batch(seed, "ties")
    q, k, selection = pack(segments, padding=int(rng.integers(0, 6)))
    v = jnp.asarray(rng.normal(size=k.shape), jnp.float32)
    table, pages = page_table(rng, np.asarray(selection.keep))
    pools = [rng.normal(size=(2, pages, k.shape[1], PAGE_ROWS, HEAD_DIM)).astype(np.float32) for _ in "kv"]

    @jax.jit
    def refresh(pool_k, pool_v, layer, q, k, v, selection, table):
        ranks = candidate_ranks(q, k, selection, scoring_of(segments))
        page, slot = destinations(ranks, selection, table, PAGE_ROWS)
        return store(pool_k, pool_v, layer, k, v, selection, page, slot), page, slot

    (got_k, got_v), page, slot = refresh(*pools, 1, q, k, v, selection, table)
    assert page.dtype == slot.dtype == jnp.int32

    expected = [pool.copy() for pool in pools]
    place, base = 0, 0
    for i, s in enumerate(segments):
        ranks = s.ranks()
        for head in range(k.shape[1]):
            by_rank = {int(rank): j for j, rank in enumerate(ranks[:, head])}
            kept = [by_rank[rank] for rank in range(s.keep)]
            for at, j in enumerate(kept):
                where = (table.pages[table.first[i] + at // PAGE_ROWS], at % PAGE_ROWS)
                assert (page[place + j, head], slot[place + j, head]) == where
                for pool, rows in zip(expected, (k, v), strict=True):
                    pool[1, where[0], head, where[1]] = rows[base + s.candidates[j], head]
            for j in set(range(len(s.candidates))) - set(kept):
                assert (page[place + j, head], slot[place + j, head]) == (0, 0)
        place, base = place + len(s.candidates), base + len(s.q)
    assert not page[place:].any()
    assert not slot[place:].any()
    for got, pool in zip((got_k, got_v), expected, strict=True):
        np.testing.assert_array_equal(got[:, 1:], pool[:, 1:])
        np.testing.assert_array_equal(got[:, 0, :, 1:], pool[:, 0, :, 1:])
        np.testing.assert_array_equal(got[0], pool[0])


def test_stored_rows_take_the_type_of_the_pool():
    (segment,) = random_batch(0, "normal", segments=1, scored=False, keep=3)
    _, k, selection = pack([segment])
    pool = jnp.zeros((1, 2, k.shape[1], PAGE_ROWS, HEAD_DIM), jnp.bfloat16)
    table = PageTable(np.array([1]), np.array([3]), np.array([0, 1]))
    ranks = candidate_ranks(k, k, selection, None)
    page, slot = destinations(ranks, selection, table, PAGE_ROWS)
    _, got = store(pool, pool, 0, k, 2 * k, selection, page, slot)
    expected = 2 * k[selection.row[:3]].astype(jnp.bfloat16)
    np.testing.assert_array_equal(got[0, 1, :, :3].swapaxes(0, 1), expected)
