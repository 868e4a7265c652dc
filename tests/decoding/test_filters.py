"""Filters of causal models, against what transformers keeps of the same logits."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.masked_logits import Level
from jdllm.pallas.masked_logits.xla import decide_logits
from tests.pallas.masked_rows import UNFILTERED, asked, kept

RECORDED = Path(__file__).parents[1] / "goldens" / "transformers_filters.npz"
VOCAB = 256


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    """Settings of a thousand draws, the seeds of their logits, and the ids that are kept, in bits."""
    with np.load(RECORDED) as file:
        return dict(file)


@pytest.fixture(scope="module")
def logits(recorded: dict[str, np.ndarray]) -> np.ndarray:
    """Those of the record, from a generator whose numbers never change."""
    rows = [np.random.RandomState(seed).standard_normal(VOCAB) for seed in recorded["seed"]]
    return (np.stack(rows) * recorded["spread"][:, None].astype(np.float64)).astype(np.float32)


def test_the_same_ids_are_kept_as_by_transformers(recorded: dict[str, np.ndarray], logits: np.ndarray):
    """What is kept are the likeliest ids, so that the sum of their probabilities tells how many they are."""
    expected = np.unpackbits(recorded["kept"], axis=1).astype(bool)
    assert recorded["order"].tolist() == [
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]
    rows = asked(
        len(logits),
        vocab=VOCAB,
        temperature=recorded["temperature"],
        tempered=True,
        top_k=np.where(recorded["top_k"] == 0, VOCAB, recorded["top_k"]),
        top_p=np.where(recorded["top_p"] == 1, UNFILTERED, recorded["top_p"]),
        min_p=recorded["min_p"],
        top_k_first=True,
    )
    tempered = logits / recorded["temperature"][:, None].astype(np.float64)
    powers = np.exp(tempered - tempered.max(axis=1, keepdims=True))
    decision = decide_logits(jnp.asarray(logits), rows, Level.FILTERED)
    np.testing.assert_allclose(decision.total, np.where(expected, powers, 0).sum(axis=1), rtol=2e-6)
    assert expected[np.arange(len(logits)), decision.token].all()
    # The oracle of other tests agrees with transformers too.
    filters = zip(rows.top_p.tolist(), rows.top_k.tolist(), rows.min_p.tolist(), strict=True)
    ours = [kept(row, *own, top_k_first=True) for row, own in zip(tempered, filters, strict=True)]
    np.testing.assert_array_equal(np.stack(ours), expected)


def test_each_order_by_hand():
    """Of 0.5, 0.3 and 0.2, the three likeliest of five, 0.7 takes two; of the whole it takes three. What
    reaches `top_p` exactly is enough. Ids as likely as the last of `top_k` are among these, and count."""
    weights = np.array([[0.4, 0.24, 0.16, 0.15, 0.05]] * 4 + [[0.4, 0.2, 0.2, 0.2, 0]] * 2, np.float32)
    rows = asked(
        6,
        vocab=5,
        tempered=True,
        top_k=[3, 3, 3, 3, 2, 2],
        top_p=[0.7, 0.7, 0.5, 0, UNFILTERED, 0.39],
        top_k_first=[True, False, True, True, True, True],
    )
    total = decide_logits(jnp.log(jnp.maximum(weights, 1e-30)), rows, Level.FILTERED).total
    np.testing.assert_allclose(total, [1.6, 2, 1, 1, 2.5, 1], rtol=1e-6)
