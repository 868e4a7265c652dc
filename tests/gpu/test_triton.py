"""Triton's kernels on a card against f32 of the highest precision. The implementation is always named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.attention import AttentionOutput, attention
from jdllm.pallas.attention.reference import attention_reference
from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.masked_logits import Level, masked_logits
from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.pallas.split_attention import split_attention
from tests.gpu import test_grouped_matmul as grouped
from tests.gpu import test_skinny_matmul as skinny
from tests.pallas import split_cases
from tests.pallas import test_masked_logits_mosaic as masked
from tests.pallas.masked_rows import check as check_decisions
from tests.pallas.masked_rows import drawn, oracle
from tests.pallas.rotation import turned

pytestmark = pytest.mark.gpu

KINDS = ("full", "causal", "window", "block_causal", "packed", "empty")
RELATIVE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 6e-4}
"""Of the outputs: probabilities and results are rounded. Products of TF32 would be off by 3e-4."""


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


@jax.jit
def exact_products(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Sums of integers below 2**24."""
    return jnp.matmul(*(x.astype(jnp.float32) for x in (hidden, head.T)), precision="highest")


# Compiled whole: each of its operations would be compiled for itself.
exact = jax.jit(attention_reference, static_argnames="scale")
triton = jax.jit(functools.partial(attention, implementation="triton"), static_argnames="scale")


def bounds(kind: str, rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of keys; of "packed" rows some are padding, and between two segments one sees nothing."""
    row, zero = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    if kind == "packed":
        start, end = zero.copy(), zero.copy()
        cuts = [0, rows // 5, rows // 5 + 1, rows // 2, rows - rows // 10]
        for a, b in ((cuts[0], cuts[1]), (cuts[2], cuts[3]), (cuts[3], cuts[4])):
            start[a:b], end[a:b] = min(a, keys), min(b, keys)
        return start, end
    return {
        "full": (zero, zero + keys),
        "causal": (zero, np.minimum(row + 1, keys)),
        "window": (np.clip(row - 100, 0, keys), np.clip(row + 101, 0, keys)),
        "block_causal": (zero, np.minimum((row // 32 + 1) * 32, keys)),
        "empty": (zero + 5, zero + 5),
    }[kind]


def case(rows: int, keys: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> list[jax.Array]:
    rng = np.random.default_rng(rows + keys + head_dim)
    shapes = ((rows, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, head_dim))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def relative(out: jax.Array, reference: jax.Array | np.ndarray) -> float:
    actual, expected = (np.asarray(x, np.float64) for x in (out, reference))
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def check(operands: list[jax.Array], start: np.ndarray, end: np.ndarray) -> AttentionOutput:
    """Queries that see nothing are NaN; so are keys before the first that is seen and behind the last."""
    q, k, v = operands
    scale = q.shape[-1] ** -0.5
    live = start < end
    clean = exact(q, k, v, start, end, scale=scale)
    key = np.arange(len(k))
    seen = (key >= start[live].min(initial=len(k))) & (key < end[live].max(initial=0))
    q = jnp.where(live[:, None, None], q, jnp.nan)
    k, v = (jnp.where(seen[:, None, None], x, jnp.nan) for x in (k, v))
    out = triton(q, k, v, start, end, scale=scale)
    assert out.o.dtype == q.dtype
    assert relative(out.o[live], clean.o[live]) < RELATIVE[q.dtype.name]
    np.testing.assert_allclose(out.m[live], clean.m[live], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.l[live], clean.l[live], rtol=1e-4)
    assert (np.asarray(out.o, np.float32)[~live] == 0).all()
    assert np.isneginf(np.asarray(out.m)[~live]).all()
    assert (np.asarray(out.l)[~live] == 0).all()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", RELATIVE)
def test_ranges_and_types(dtype: str, kind: str):
    check(case(1000, 1000, 8, 2, 128, dtype), *bounds(kind, 1000, 1000))


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 160, 256])
def test_sizes_of_heads(head_dim: int, dtype: str):
    for kind in ("full", "packed"):
        check(case(300, 300, 4, 2, head_dim, dtype), *bounds(kind, 300, 300))


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (28, 4), (32, 8), (6, 1)])
def test_query_heads_share_key_heads_in_order(heads: int, kv_heads: int):
    check(case(500, 500, heads, kv_heads, 128, "bfloat16"), *bounds("packed", 500, 500))


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 4097), (129, 5), (128, 128), (2049, 777)])
def test_any_number_of_rows_and_keys(rows: int, keys: int):
    for kind in ("full", "causal", "window"):
        check(case(rows, keys, 4, 2, 64, "bfloat16"), *bounds(kind, rows, keys))


def test_a_segment_is_what_it_is_alone():
    operands = case(700, 700, 4, 2, 128, "bfloat16")
    out = check(operands, *bounds("packed", 700, 700))
    alone = slice(350, 630)
    own = triton(*(x[alone] for x in operands), *bounds("full", 280, 280), scale=128**-0.5)
    assert relative(out.o[alone], own.o) < RELATIVE["bfloat16"]
    np.testing.assert_allclose(out.m[alone], own.m, rtol=1e-5, atol=1e-5)


class TestSplitAttention:
    """Entries of scattered pages, whose rows that are not live hold a large number, and fresh rows."""

    counts = ([64] * 60, [], [1], [64, 17, 0, 64], [64] * 7 + [5])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(32, 32, 32), (28, 4, 1), (32, 8, 8)])
    def test_equals_float64(self, heads: int, kv_heads: int, queries: int, head_dim: int, dtype: str):
        sizes = {"heads": heads, "kv_heads": kv_heads, "queries": queries, "head_dim": head_dim}
        bare = split_cases.case(list(self.counts), dtype=jnp.dtype(dtype), **sizes)
        c, fresh, seen = split_cases.with_fresh(bare, [32, 0, 5, 64, 1])
        attend = jax.jit(functools.partial(split_attention, scale=c.scale, implementation="triton"))
        found = attend(*c[:4], fresh=fresh, layer=c.layer)
        split_cases.check(found, split_cases.oracle(bare, seen), 4 * RELATIVE[dtype])
        for first, again in zip(found, attend(*c[:4], fresh=fresh, layer=c.layer), strict=True):
            np.testing.assert_array_equal(first, again)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(32, 32, 32), (28, 4, 1), (32, 8, 8)])
    def test_pages_in_8_bits(self, heads: int, kv_heads: int, queries: int, head_dim: int, dtype: str):
        sizes = {"heads": heads, "kv_heads": kv_heads, "queries": queries, "head_dim": head_dim}
        bare = split_cases.case(list(self.counts), dtype=jnp.dtype(dtype), **sizes)
        c, fresh, seen = split_cases.with_fresh(bare, [32, 0, 5, 64, 1])
        stands_for, pools = split_cases.rounded(bare)
        attend = jax.jit(functools.partial(split_attention, scale=c.scale, implementation="triton"))
        found = attend(c.q, *pools, c.table, fresh=fresh, layer=c.layer)
        split_cases.check(found, split_cases.oracle(stands_for, seen), 4 * RELATIVE[dtype])


class TestMaskedLogits:
    """Small integers, whose products are exact in every type, against float64."""

    decide = staticmethod(
        jax.jit(functools.partial(masked_logits, implementation="triton"), static_argnames="level")
    )

    @pytest.mark.parametrize("dtype", RELATIVE)
    @pytest.mark.parametrize(
        ("count", "vocab", "depth"), [(3, 257, 72), (8, 126464, 4096), (64, 8000, 1024), (300, 5000, 128)]
    )
    def test_equals_float64(self, count: int, vocab: int, depth: int, dtype: str):
        """All that rows can ask for at once; those behind the count are NaN."""
        rows = count + 9
        hidden, head = masked.operands(rows, vocab, jnp.dtype(dtype), depth)
        sampling = masked.everything(rows, vocab)
        live = jax.tree.map(lambda x: x[:count], sampling)
        draws = np.asarray(live.temperature)[:, None] * drawn(masked.SEED, masked.STEP, count, vocab)
        expected = oracle(np.asarray(exact_products(hidden[:count], head), np.float64), live, draws)
        poisoned = jnp.where(jnp.arange(rows)[:, None] < count, hidden, jnp.nan)
        for level in (Level.TOP, Level.MOMENTS):
            actual = self.decide(poisoned, head, sampling, level=level, count=jnp.int32(count))
            check_decisions(jax.tree.map(lambda x: x[:count], actual), expected, level)


class TestGroupedMatmul:
    """Experts of LLaDA-MoE."""

    multiply = staticmethod(
        jax.jit(functools.partial(grouped_matmul, first_group=grouped.FIRST, implementation="triton"))
    )

    @pytest.mark.parametrize("dtype", RELATIVE)
    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize(
        "sizes", [grouped.balanced(512), grouped.skewed(32768)], ids=lambda s: f"{s.sum()}"
    )
    def test_equals_f32(self, sizes: np.ndarray, gated: bool, dtype: str):
        x, weights, gate = (a.astype(dtype) for a in grouped.draw(int(sizes.sum()), *grouped.SIDES[0]))
        expected = grouped.exact(x, weights, sizes)
        if gated:
            gates = grouped.exact(x, gate, sizes)
            expected *= gates / (1 + np.exp(-gates))
        actual = self.multiply(x, weights, jnp.asarray(sizes), gate=gate if gated else None)
        assert actual.dtype == dtype
        assert relative(actual, expected) < RELATIVE[dtype] * (1 + gated)

    @pytest.mark.parametrize("dtype", RELATIVE)
    @pytest.mark.parametrize(("k", "n"), [(100, 72), (37, 515), (1, 1)])
    def test_any_sides(self, k: int, n: int, dtype: str):
        sizes = grouped.skewed(2000)
        x, weights, _ = (a.astype(dtype) for a in grouped.draw(2000, k, n))
        actual = self.multiply(x, weights, jnp.asarray(sizes))
        assert relative(actual, grouped.exact(x, weights, sizes)) < RELATIVE[dtype]

    @pytest.mark.parametrize("dtype", RELATIVE)
    @pytest.mark.parametrize("gated", [False, True])
    def test_a_row_does_not_depend_on_the_others(self, gated: bool, dtype: str):
        """Every third row of some groups, which are cut as fewer rows are: the same bits."""
        sizes = grouped.skewed(8192)
        x, weights, gate = (a.astype(dtype) for a in grouped.draw(8192, *grouped.SIDES[0]))
        options = {"gate": gate if gated else None}
        whole = np.asarray(self.multiply(x, weights, jnp.asarray(sizes), **options))
        group = np.repeat(np.arange(grouped.GROUPS), sizes)
        kept = np.flatnonzero((np.arange(8192) % 3 == 0) & (group % 5 != 2))
        some = np.bincount(group[kept], minlength=grouped.GROUPS)
        part = self.multiply(x[kept], weights, jnp.asarray(some, jnp.int32), **options)
        np.testing.assert_array_equal(np.asarray(part), whole[kept])


class TestSkinnyMatmul:
    """Products of LLaDA-8B's and Dream-7B's layers."""

    @pytest.mark.parametrize("dtype", RELATIVE)
    @pytest.mark.parametrize("rows", [1, 13, 32, 64])
    @pytest.mark.parametrize("product", skinny.PRODUCTS)
    def test_equals_f32(self, product: str, rows: int, dtype: str):
        """And again, bit by bit: the order of sums does not depend on timing."""
        outputs, k, gated = skinny.PRODUCTS[product]
        x, stacks = skinny.operands(rows, outputs, k, jnp.dtype(dtype).type)
        multiply = jax.jit(functools.partial(skinny_matmul, gated=gated, implementation="triton"))
        found = multiply(x, stacks, layer=jnp.int32(skinny.LAYER))
        for actual, expected in zip(found, skinny.exact_products(x, stacks, None, gated=gated), strict=True):
            assert actual.dtype == dtype
            assert relative(actual, expected) < RELATIVE[dtype] * (1 + gated)
        for first, again in zip(found, multiply(x, stacks, layer=jnp.int32(skinny.LAYER)), strict=True):
            np.testing.assert_array_equal(first, again)

    @pytest.mark.parametrize("dtype", RELATIVE)
    @pytest.mark.parametrize(("outputs", "k"), [((72, 8, 515), 100), ((5,), 37), ((1,), 4096)])
    def test_any_sides(self, outputs: tuple[int, ...], k: int, dtype: str):
        x, stacks = skinny.operands(9, outputs, k, jnp.dtype(dtype).type)
        found = skinny_matmul(x, stacks, layer=skinny.LAYER, implementation="triton")
        for actual, expected in zip(found, skinny.exact_products(x, stacks, None, gated=False), strict=True):
            assert relative(actual, expected) < RELATIVE[dtype]

    @pytest.mark.parametrize("dtype", RELATIVE)
    def test_rotated_queries_and_keys_with_a_bias(self, dtype: str):
        outputs, k, _ = skinny.PRODUCTS["dream-qkv"]
        x, stacks = skinny.operands(32, outputs, k, jnp.dtype(dtype).type)
        bias = jax.random.normal(jax.random.key(1), (skinny.LAYERS, sum(outputs)), x.dtype)
        angles = jax.random.uniform(jax.random.key(2), (32, 64), maxval=6)
        options = {"bias": bias, "rotation": (jnp.cos(angles), jnp.sin(angles))}
        found = skinny_matmul(x, stacks, layer=skinny.LAYER, implementation="triton", **options)
        exact = skinny.exact_products(x, stacks, bias, gated=False)
        for index, (actual, expected) in enumerate(zip(found, exact, strict=True)):
            assert relative(actual, turned(expected, angles * (index < 2))) < 2 * RELATIVE[dtype]
