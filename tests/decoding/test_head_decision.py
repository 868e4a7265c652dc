"""The decisions of cards that have parts of the ids, against float64 over all ids."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.head_decision import head_decision
from jdllm.models.cards import AXIS
from jdllm.models.leaf import VocabularyPart
from jdllm.pallas.masked_logits import Level, RowDecision, RowSampling
from tests.pallas.masked_rows import NONE, asked, check, drawn, oracle, penalties

ROWS, DEPTH, SEED, STEP = 21, 64, 2**40 + 5, 3


def everything(vocab: int, **columns: Any) -> RowSampling:
    """Rows that differ in all that can be asked for; some limits leave nothing to the last cards."""
    rng = np.random.default_rng(ROWS)
    return asked(
        ROWS,
        vocab=vocab,
        seed=SEED,
        step=STEP,
        temperature=np.resize([0.0, 0.7, 4.0], ROWS),
        tempered=rng.random(ROWS) < 0.5,
        limit=rng.integers(vocab // 5, vocab + 1, ROWS),
        token_bans=rng.integers(NONE, vocab, (ROWS, 2)),
        confidence_bans=rng.integers(NONE, vocab, (ROWS, 2)),
        **columns,
    )


def on_cards(hidden: jax.Array, head: jax.Array, rows: RowSampling, level: Level, cards: int) -> RowDecision:
    """What each card decides, `[cards, rows]` each. Cards are a mapped axis here."""
    own = -(-len(head) // (256 * cards)) * 256
    # Nobody may read what is behind the last id.
    padded = jnp.pad(head, ((0, own * cards - len(head)), (0, 0)), constant_values=100)

    def decide(part: jax.Array) -> RowDecision:
        return head_decision(hidden, VocabularyPart(part, len(head)), rows, level)

    return jax.jit(jax.vmap(decide, axis_name=AXIS))(padded.reshape(cards, own, -1))


def operands(vocab: int, level: Level) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Rows, a head, and their logits, which f32 holds exactly. Many logits of a row are equal, but hardly any
    for filters: these would keep all that equal the last one."""
    rng = np.random.default_rng(vocab)
    most = 40 if level is Level.FILTERED else 1
    numbers = (rng.integers(-most, most + 1, (n, DEPTH)) / most for n in (ROWS, vocab))
    hidden, head = (jnp.asarray(np.round(16 * x) / 16, jnp.float32) for x in numbers)
    return hidden, head, np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T


@pytest.mark.parametrize(("cards", "vocab"), [(2, 512), (2, 700), (4, 700), (4, 1000), (8, 600)])
@pytest.mark.parametrize("level", [Level.TOP, Level.MOMENTS, Level.FILTERED])
def test_cards_decide_alike_and_as_one_would(cards: int, vocab: int, level: Level):
    hidden, head, logits = operands(vocab, level)
    rows = everything(vocab, **({"top_k": 7} if level is Level.FILTERED else {}))
    rows = rows._replace(penalty=penalties(ROWS, vocab))
    draws = np.asarray(rows.temperature)[:, None] * drawn(SEED, STEP, ROWS, vocab)
    expected = oracle(logits, rows, draws)
    assert len({int(token) // 256 for token in expected.token}) > 1
    assert (expected.token != oracle(logits, rows).token).any()
    found = on_cards(hidden, head, rows, level, cards)
    for card in range(cards):
        check(jax.tree.map(lambda x, card=card: x[card], found), expected, level)


def test_of_equal_logits_on_two_cards_the_lowest_id_is_taken():
    hidden, head = jnp.ones((1, DEPTH)), jnp.zeros((700, DEPTH)).at[jnp.asarray([40, 400, 690]), 0].set(1)
    found = on_cards(hidden, head, asked(1, vocab=700), Level.MOMENTS, 4)
    assert found.token[:, 0].tolist() == [40] * 4
    assert found.second[:, 0].tolist() == [1] * 4
