"""Attention over two ranges of keys, against the softmax over both in float64."""

import numpy as np

from jdllm.execution.two_ranges import FurtherKeys, seeing_both
from jdllm.models.block import Rows

ROWS, HEADS, WIDTH, SCALE = 12, 2, 8, 0.35


def test_a_row_sees_the_keys_of_both_ranges():
    """Ranges of all kinds: both, either, and none, before and behind each other."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((ROWS, HEADS, WIDTH)).astype(np.float32) for _ in range(3))
    first = rng.integers(0, ROWS // 2, (2, ROWS)).astype(np.int32)
    second = rng.integers(ROWS // 2, ROWS + 1, (2, ROWS)).astype(np.int32)
    first, second = np.sort(first, axis=0), np.sort(second, axis=0)
    first[:, 0] = second[:, 0] = 0
    (first[:, 1], second[:, 1]), first[:, 2], second[:, 3] = ([6, 9], [0, 4]), 0, 0
    rows = Rows(np.arange(ROWS, dtype=np.int32), *first)
    o, m, total = seeing_both(rows, FurtherKeys(*second))(q, k, v, *first, scale=SCALE)
    key = np.arange(ROWS)
    for row in range(ROWS):
        seen = np.zeros(ROWS, bool)
        for start, end in (first[:, row], second[:, row]):
            seen |= (start <= key) & (key < end)
        scores = SCALE * np.einsum("hd,khd->hk", q[row].astype(np.float64), k.astype(np.float64))
        weights = np.where(seen, np.exp(scores), 0)
        share = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
        np.testing.assert_allclose(o[row], np.einsum("hk,khd->hd", share, v), atol=1e-5)
        if seen.any():
            np.testing.assert_allclose(m[row] + np.log(total[row]), np.log(weights.sum(axis=1)), atol=1e-5)
        else:
            assert not np.asarray(total[row]).any()
