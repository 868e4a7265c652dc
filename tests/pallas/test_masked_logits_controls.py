"""Controls of the masked head against float64, id by id."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.pallas.masked_logits import ANY, Level, RowControl, RowDecision, RowSampling
from jdllm.pallas.masked_logits.xla import masked_logits_xla
from tests.pallas.masked_rows import asked, check, drawn, oracle, penalties

jitted = jax.jit(masked_logits_xla, static_argnums=3)
OUTSIDE = 2**30


def decide(logits: np.ndarray, rows: RowSampling, level: Level = Level.FILTERED) -> RowDecision:
    head = jnp.eye(logits.shape[1], dtype=jnp.float32)
    return jitted(jnp.asarray(logits, jnp.float32), head, rows, level)


def words_of(allowed: np.ndarray) -> np.ndarray:
    """A bit for each id, written out: id i is bit i % 32 of word i // 32."""
    words = np.zeros((len(allowed), -(-allowed.shape[1] // 32)), np.uint64)
    for row, id in np.argwhere(allowed):
        words[row, id // 32] |= np.uint64(1 << int(id % 32))
    return words.astype(np.uint32)


def controls(rng: np.random.Generator, rows: int, vocab: int, raised: int) -> tuple[RowControl, np.ndarray]:
    """Controls of rows, the last of which asks for none; and which ids each may have."""
    allowed = rng.random((rows, vocab)) < rng.choice([0.2, 0.9, 1.0], (rows, 1))
    allowed[np.arange(rows), rng.integers(0, vocab, rows)] = True
    ids = np.stack([rng.permutation(vocab)[:raised] for _ in range(rows)]).astype(np.int32)
    unused = rng.random((rows, raised)) < 0.3
    ids = np.where(unused, OUTSIDE + np.arange(raised, dtype=np.int32), ids)
    late = rng.normal(0, 5, (rows, raised)).astype(np.float32)
    early = np.where(rng.random((rows, raised)) < 0.3, -np.inf, late).astype(np.float32)
    free = np.argmax(allowed, axis=1)  # one id that stays
    early = np.where(ids == free[:, None], late, early)
    until = rng.integers(0, rows + 1, rows).astype(np.int32)
    allowed[-1], early[-1], late[-1] = True, 0, 0
    return RowControl(np.arange(rows) < rows - 1, words_of(allowed), ids, early, late, until), allowed


def controlled(logits: np.ndarray, control: RowControl, allowed: np.ndarray) -> np.ndarray:
    """float64 logits of rows at positions 0, 1, ... after their controls, id by id."""
    out = logits.astype(np.float64)
    for row, ids in enumerate(control.ids):
        values = control.early if row < control.until[row] else control.late
        for id, by in zip(ids, values[row], strict=True):
            if id < out.shape[1]:
                out[row, id] += by
        for id in range(out.shape[1]):
            if not allowed[row, id]:
                out[row, id] = -np.inf
    return out


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from([1, 5]),
    vocab=st.sampled_from([33, 64, 300]),
    temperature=st.sampled_from([0.0, 0.75]),
    filters=st.sampled_from([{}, {"top_k": 4}]),
    penalised=st.booleans(),
)
def test_equals_float64(
    seed: int, rows: int, vocab: int, temperature: float, filters: dict[str, int], penalised: bool
):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (rows, vocab)).astype(np.float32)
    control, allowed = controls(rng, rows, vocab, raised=16)
    plain = asked(rows, vocab=vocab, temperature=temperature, **filters)
    if penalised:
        plain = plain._replace(penalty=penalties(rows, vocab))
    noise = temperature * drawn(0, 0, rows, vocab)
    with np.errstate(invalid="ignore"):
        expected = oracle(controlled(logits, control, allowed), plain, noise)
    check(decide(logits, plain._replace(control=control)), expected)
    free = asked(1, vocab=vocab)._replace(control=jax.tree.map(lambda x: x[-1:], control))
    without = decide(logits[-1:], asked(1, vocab=vocab))
    jax.tree.map(np.testing.assert_array_equal, decide(logits[-1:], free), without)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), longest=st.sampled_from([2, 5]))
def test_no_word_is_completed(seed: int, longest: int):
    """Ids of a small vocabulary, so that words often come together; of each row, words of several lengths."""
    rng, rows, vocab = np.random.default_rng(seed), 6, 40
    logits = rng.normal(0, 4, (rows, vocab)).astype(np.float32)
    left = rng.integers(-1, 2, (rows, longest - 1)).astype(np.int32)
    words = np.full((rows, 16, longest), ANY, np.int32)
    for row, word in np.ndindex(rows, 12):
        length = int(rng.integers(1, longest + 1))
        words[row, word, longest - length :] = [*rng.integers(0, 2, length - 1), rng.integers(0, vocab)]
    expected = logits.astype(np.float64)
    for row, word in np.ndindex(rows, 12):
        *before, last = [id for id in words[row, word] if id != ANY]
        if left[row][len(left[row]) - len(before) :].tolist() == before:
            expected[row, last] = -np.inf
    control, _ = controls(rng, rows, vocab, raised=1)
    free = jax.tree.map(lambda x: np.repeat(x[-1:], rows, axis=0), control)
    plain = asked(rows, vocab=vocab)
    found = decide(logits, plain._replace(control=free._replace(words=words, left=left)))
    check(found, oracle(expected, plain))


def test_one_id_left_is_certain():
    logits = np.random.default_rng(0).normal(0, 4, (3, 70)).astype(np.float32)
    allowed = np.zeros((3, 70), bool)
    allowed[[0, 1, 2], [0, 31, 69]] = True
    nothing = np.zeros((3, 1), np.float32)
    ids, until = np.full((3, 1), OUTSIDE, np.int32), np.zeros(3, np.int32)
    control = RowControl(np.ones(3, bool), words_of(allowed), ids, nothing, nothing, until)
    found = decide(logits, asked(3, vocab=70)._replace(control=control))
    np.testing.assert_array_equal(found.token, [0, 31, 69])
    np.testing.assert_array_equal(found.total, np.ones(3))
    np.testing.assert_array_equal(found.negative_entropy, np.zeros(3))


@pytest.mark.parametrize("level", [Level.TOP, Level.MOMENTS])
def test_levels_without_logits_have_no_controls(level: Level):
    logits = np.random.default_rng(1).normal(0, 4, (4, 64)).astype(np.float32)
    control, _ = controls(np.random.default_rng(2), 4, 64, raised=8)
    found = decide(logits, asked(4, vocab=64)._replace(control=control), level)
    jax.tree.map(np.testing.assert_array_equal, found, decide(logits, asked(4, vocab=64), level))
