"""Models whose rows predict their own tokens (LLaDA). Nothing was recorded of them: the oracle is float64.

A chunk is scored token by token, each by a mask in its place. The first step of a block is a step like the
others: it evaluates the block's own rows, and the transfer rule says what it commits.
"""

from typing import Any, Literal

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.serving.engine import Engine
from jdllm.serving.long.request import LongRequest
from tests.engines import engine_of
from tests.helpers import Golden
from tests.prefilling.asking import PAGES, ROWS, all_free, asked, end, model_of, question, same
from tests.prefilling.oracle import leave_one_out_scores, select
from tests.prefilling.oracle_cache import Layout, Retention, build_parts, build_whole, keep, prefill_query
from tests.prefilling.oracle_model import Cache, Model, forward, load, log_softmax

MASK = 510
NONE = np.zeros(0, int)
BUILDS = ["full_mask", "full_query", "chunk_query", "chunk_only"]


@pytest.fixture(scope="module")
def engine(executables: Executables) -> Engine:
    return engine_of(*model_of("llada"), executables, ROWS, pages=PAGES)


@pytest.fixture(scope="module")
def oracle() -> Model:
    return load(Golden("llada").directory)


def ask(engine: Engine, seed: int, prefilling: dict[str, Any], **sampling: Any) -> LongRequest:
    spec = asked(question(seed), model_of("llada")[1], prefilling=prefilling, **sampling)
    request = end(engine, spec)
    all_free(engine)
    return request


def drafted(oracle: Model, front: np.ndarray, slots: int, rounds: int) -> np.ndarray:
    """Slots behind instruction and query: the first is filled, and then the surest one in each round."""
    tokens = np.concatenate([front, np.full(slots, MASK)])
    own = np.arange(len(front), len(tokens))
    seen = np.ones((len(tokens), len(tokens)), bool)
    seen[: len(front), len(front) :] = False
    for round in range(rounds + 1):
        logits = forward(oracle, tokens, np.arange(len(tokens)), seen).logits[own]
        sure = np.where(tokens[own] == MASK, log_softmax(logits).max(axis=-1), -np.inf)
        slot = sure.argmax() if round else 0
        tokens[own[slot]] = logits[slot].argmax()
    return tokens[own]


@pytest.mark.parametrize("mask", ["causal", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({"score": "query"}, 0),
        pytest.param({"score": "query", "score_window": 4}, 0, marks=pytest.mark.slow),
        pytest.param({"draft_length": 4, "draft_rounds": 2}, 4, marks=pytest.mark.slow),
        pytest.param(
            {"draft_length": 3, "draft_rounds": 0, "score_unfilled": True, "score_window": 2},
            3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_scores_are_those_of_tokens_that_are_left_out_one_by_one(
    engine: Engine, oracle: Model, fields: dict[str, Any], slots: int, mask: Literal["causal", "full"]
):
    """Once by whole chunks, and once by what is behind chunks that are stored already."""
    asking = question(11)
    spec = asked(asking, model_of("llada")[1], prefilling={"score_mask": mask, **fields})
    parts = [chunk.tokens for chunk in spec.chunks]
    labels = NONE
    if slots:
        front = np.concatenate([asking.instruction, asking.query])
        labels = drafted(oracle, front, slots, fields["draft_rounds"])
    scored = (labels != MASK) | fields.get("score_unfilled", False)
    window = fields.get("score_window", 0)
    sequences = asking.instruction, parts, asking.query, labels, scored
    expected = leave_one_out_scores(oracle, *sequences, MASK, mask, window)
    stored = []
    for _ in range(2):
        found = end(engine, spec).prefilled
        np.testing.assert_array_equal(found.draft, labels)
        np.testing.assert_allclose(found.scores, expected, rtol=0, atol=5e-5)
        assert found.selected == select(expected, 2)
        stored.append(found.cached_chunks)
    assert stored[1] == len(parts)


def denoised(
    oracle: Model,
    cache: Cache,
    used: np.ndarray,
    first: np.ndarray | None,
    masks: int,
    length: int,
    threshold: float,
) -> list[np.ndarray]:
    """The answer after every step: `masks` slots in blocks of `length`.

    Beside what is before it and its own rows, a block sees the masks that follow it as they were when it
    began.

    Arguments:
    - `cache`: ends at the query, or has rows of all masks already, whose logits are `first`.
    - `used`: positions up to the query.
    """
    positions = np.concatenate([used, int(used[-1]) + 1 + np.arange(masks)])
    places = np.arange(len(used), len(positions))
    tokens, states = np.full(masks, MASK), []
    for at in range(0, masks, length):
        block = slice(at, min(at + length, masks))
        if at or first is None:
            out = forward(oracle, tokens[at:], positions, cache=cache.take(slice(len(used) + at)))
            cache, logits = out.cache, out.logits[: block.stop - at]
        else:
            logits = first[block]
        while True:
            _commit(tokens[block], logits, threshold)
            states.append(tokens.copy())
            if MASK not in tokens[block]:
                break
            logits = _again(oracle, tokens[block], positions, cache, places[block]).logits
        cache = _again(oracle, tokens[block], positions, cache, places[block]).cache
    return states


def _again(oracle: Model, tokens: np.ndarray, positions: np.ndarray, cache: Cache, slots: np.ndarray) -> Any:
    return forward(oracle, tokens, positions[: cache.rows], cache=cache, slots=slots)


def _commit(tokens: np.ndarray, logits: np.ndarray, threshold: float) -> None:
    """All that are sure enough, and the surest; never the mask id."""
    logits = logits.copy()
    sure = log_softmax(logits)
    choice = np.where(np.arange(logits.shape[-1]) == MASK, -np.inf, logits).argmax(axis=-1)
    sure = np.where(tokens == MASK, np.exp(sure[np.arange(len(choice)), choice]), -np.inf)
    chosen = (sure >= threshold) | (np.arange(len(sure)) == sure.argmax())
    tokens[chosen] = choice[chosen]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("block_length", [8, 3])
@pytest.mark.parametrize(
    "kept", [None, *(pytest.param(kept, marks=pytest.mark.slow) for kept in ("per_head", "global"))]
)
def test_an_answer_is_that_of_the_oracle(
    engine: Engine, oracle: Model, build: str, block_length: int, kept: str | None
):
    asking = question(12)
    fields: dict[str, Any] = {"build": build, "score": "query", "retention_pool": 3}
    retention = Retention(0)
    if kept is not None:
        fields |= {"tokens_kept": 12, "retention": kept}
        retention = Retention(12, kernel=3, per_head=kept == "per_head")
    found = ask(engine, 12, fields, gen_length=8, block_length=block_length, threshold=0.02)
    assert MASK not in found.tokens
    chunks = [found.long_spec.chunks[i].tokens for i in found.prefilled.selected]
    rows = [keep(oracle, asking.instruction, chunk, asking.query, retention)[0] for chunk in chunks]
    for mine, theirs in zip(found.prefilled.kept, rows, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    layout = Layout(
        len(asking.instruction), 32, found.prefilled.selected, "continuous", "after_selected_chunks"
    )
    parts = oracle, asking.instruction, chunks, rows
    first = None
    if build.startswith("full"):
        masks = np.full(8 if build == "full_mask" else 0, MASK)
        built = build_whole(*parts, asking.query, masks, layout)
        cache, used = built.cache, built.positions[: len(built.positions) - len(masks)]
        if len(masks):
            first = forward(oracle, *built.forwards[0]).logits[-8:]
    else:
        built = build_parts(*parts, NONE, "causal", layout, build == "chunk_only")
        cache, used, _ = prefill_query(oracle, built, asking.query)
    states = denoised(oracle, cache, used, first, 8, block_length, 0.02)
    assert found.steps == len(states)
    np.testing.assert_array_equal(found.history, [[*asking.query, *state] for state in states])


@pytest.mark.slow
def test_a_block_begins_with_a_usual_step(engine: Engine):
    """Where the threshold lets everything pass, one step for each block is all there is."""
    for build in BUILDS:
        request = ask(engine, 13, {"build": build}, gen_length=10, block_length=4, threshold=0.0)
        assert request.steps == 3
        assert MASK not in request.tokens
        np.testing.assert_array_equal(request.committed_in[-10:], [0] * 4 + [1] * 4 + [2] * 2)


def test_a_quota_leaves_no_masks(engine: Engine):
    request = ask(engine, 14, {}, gen_length=12, block_length=6, steps=4, transfer="schedule", threshold=None)
    assert request.steps == 4
    assert MASK not in request.tokens
    assert np.bincount(request.committed_in[-12:]).tolist() == [3, 3, 3, 3]


def test_without_a_context_there_is_nothing_to_score(engine: Engine):
    spec = asked(question(15, context=0), model_of("llada")[1])
    first, again = end(engine, spec), end(engine, spec)
    assert first.prefilled.scores == first.prefilled.selected == first.prefilled.draft == []
    assert MASK not in first.tokens
    same(first, again)
