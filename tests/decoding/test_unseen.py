"""Tokens that parts leave on the device, beside a plain loop over rows."""

import numpy as np
import pytest

from jdllm.decoding.unseen import Unseen, with_unseen


@pytest.mark.parametrize("seed", range(3))
def test_rows_take_the_tokens_that_they_wait_for(seed: int):
    rng = np.random.default_rng(seed)
    refreshed, reused = rng.integers(0, 100, (2, 6)).astype(np.int32)
    tokens = rng.integers(100, 200, 9).astype(np.int32)
    source = rng.integers(-1, 12, 9).astype(np.int32)
    expected = [
        tokens[row] if at < 0 else refreshed[at] if at < 6 else reused[at - 6]
        for row, at in enumerate(source)
    ]
    np.testing.assert_array_equal(with_unseen(tokens, Unseen(refreshed, reused, source)), expected)
