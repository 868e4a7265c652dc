"""Long requests beside others: they give what they give alone, as far as they are asked to go."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended, StepUpdate
from tests.helpers import slow
from tests.prefilling.asking import (
    all_free,
    end,
    ends,
    recorded_spec,
)
from tests.prefilling.mixed import CONFIG, SPECS, alike, long
from tests.prefilling.oracle_model import log_softmax
from tests.prefilling.recorded import Case

MASK = CONFIG.mask_id
Build = Callable[..., Engine]


@pytest.mark.parametrize("updates", ["every", slow("later"), slow("none")])
@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (["two blocks", "few tokens", "exact"], {}),
        pytest.param(list(SPECS), {}, marks=pytest.mark.slow),
        pytest.param(list(SPECS), {"rows": 192, "pages": 24}, marks=pytest.mark.slow),
        pytest.param(list(SPECS), {"rows": 64}, marks=pytest.mark.slow),
    ],
    ids=["few", "wide", "narrow", "all beyond the budget"],
)
def test_requests_are_the_same_alone_and_in_company(
    build: Build, alone: dict[str, Any], names: list[str], sizes: dict[str, int], updates: Any
):
    """In any order, in an engine that has room for all, and in one where they wait for pages and rows."""
    assert all(MASK not in alone[name].tokens for name in names)
    for order in (names, names[::-1]):
        engine = build(**sizes)
        found = ends(engine, [SPECS[name] for name in order], updates=updates)
        for name, request in zip(order, found, strict=True):
            alike(request, alone[name])
        all_free(engine)


@pytest.mark.slow
def test_two_threads_share_one_engine(build: Build, alone: dict[str, Any]):
    engine, found = build(), dict[str, Request]()

    def run(name: str) -> None:
        found[name] = ends(engine, [SPECS[name]], updates="every")[0]

    threads = [threading.Thread(target=run, args=(name,)) for name in ("two blocks", "few tokens", "dual")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, request in found.items():
        alike(request, alone[name])
    assert len(found) == len(threads)
    all_free(engine)


@pytest.mark.slow
def test_what_came_of_each_stage_is_told(build: Build):
    case = Case("sparse_global")
    request = end(build(), recorded_spec("sparse_global", CONFIG))
    found = request.prefilled
    assert found.spans == [tuple(case["chunk_spans"][i]) for i in found.selected]
    assert len(found.scores) == len(case["chunk_lengths"])
    assert found.draft == case["draft_states"][-1].tolist()
    assert [len(kept) for kept in found.kept] == [12] * 3
    assert list(found.seconds) == ["draft", "score", "retain", "build"]
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert sum(found.seconds.values()) <= request.timings().running


def test_the_seed_decides_what_is_drawn(build: Build):
    drawn = [
        end(build(), long(45, temperature=1.5, seed=seed, gen_length=12, block_length=4)).tokens
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()


def test_steps_are_told_once_and_in_order(build: Build, alone: dict[str, Any]):
    for name in ("whole", "two blocks", "one by one"):
        engine, expected = build(), alone[name]
        told = [update for update in engine.run([SPECS[name]], updates="every")]
        steps = [update for update in told if isinstance(update, StepUpdate)]
        assert [update.step for update in steps] == list(range(expected.steps))
        tokens = expected.spec.tokens.copy()
        for update, state in zip(steps, expected.history, strict=True):
            assert (tokens[update.positions] == MASK).all()
            tokens[update.positions[update.committed]] = update.provisional[update.committed]
            np.testing.assert_array_equal(tokens, state)


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_steps_that_committed(build: Build):
    """The first token's is recorded: its step is the evaluation that opens the block."""
    for name in ("best47_two_blocks", "chunk_query_causal"):
        case = Case(name)
        request = end(build(), recorded_spec(name, CONFIG))
        first = request.returned.start
        logits = case["first_token_logits"]
        expected = log_softmax(logits.astype(np.float64))[logits.argmax()]
        np.testing.assert_allclose(request.logprobs[first], expected, atol=1e-4)
        slots = case["mask_rows"]
        sure = log_softmax(case["mask_logits"].astype(np.float64)).max(axis=-1)
        taken = request.committed_in[first + slots] == 1
        assert taken.any()
        np.testing.assert_allclose(request.logprobs[first + slots[taken]], sure[taken], atol=1e-4)
        for position in range(first, len(request.tokens)):
            step = request.committed_in[position]
            assert request.history[step][position] == request.tokens[position]
            assert step == 0 or request.history[step - 1][position] == MASK


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full_mask", "chunk_query"])
def test_fewer_tokens_are_the_first_of_more(build: Build, mode: str):
    """Blocks beyond `max_tokens` are seen as masks, and never denoised."""
    options: dict[str, Any] = {"prefilling": {"build": mode}, "gen_length": 14, "block_length": 4}
    engine = build()
    whole = end(engine, long(48, **options))
    for most, blocks in ((3, 1), (4, 1), (5, 2), (14, 4)):
        part = end(engine, long(48, max_tokens=most, **options))
        filled = part.returned.start + min(4 * blocks, 14)
        np.testing.assert_array_equal(part.tokens[:filled], whole.tokens[:filled])
        assert (part.tokens[filled:] == MASK).all()
        assert part.returned.stop - part.returned.start == most
        all_free(engine)


@pytest.mark.parametrize("mode", ["full_mask", "chunk_query"])
def test_the_answer_ends_with_the_block_in_which_its_text_ends(build: Build, mode: str):
    options: dict[str, Any] = {"prefilling": {"build": mode}, "gen_length": 12, "block_length": 4}
    engine = build()
    whole = end(engine, long(49, **options))
    answer = whole.tokens[whole.returned]
    for place in (1, 6, 9):
        stop = int(answer[place])
        first = int(np.flatnonzero(answer == stop)[0])
        part = end(engine, long(49, stop_token_ids=[stop], **{**options, "early_stop": True}))
        filled = (first // 4 + 1) * 4
        np.testing.assert_array_equal(part.tokens[part.returned][:filled], answer[:filled])
        assert (part.tokens[part.returned][filled:] == MASK).all()
        assert part.end_of_text() == first
        all_free(engine)


@pytest.mark.slow
def test_every_evaluation_of_the_model_is_counted(build: Build):
    """Those of a draft on the device; a step that opens a block is one with what it stores."""
    for fields, others in [
        ({"score": "query"}, 1),
        ({"draft_rounds": 2}, 3 + 1),
        ({"draft_rounds": None, "draft_length": 1}, 1 + 1),
        ({"score": "query", "tokens_kept": 9}, 1 + 1),
        ({"score": "query", "build": "chunk_query"}, 1 + 1),
    ]:
        engine = build()
        request = end(engine, long(52, fields))
        assert engine.evaluated == request.steps + others


def test_an_engine_that_fails_ends_long_requests(build: Build, alone: dict[str, Any]):
    for steps in (0, 2, 5):
        engine, told = build(), []
        for name in ("two blocks", "few tokens"):
            engine.add(SPECS[name], deliver=told.append)
        for _ in range(steps):
            engine.step()
        engine.fail(RuntimeError("no device"))
        assert [str(u.error) for u in told if isinstance(u, Ended)] == ["no device"] * 2
        all_free(engine)
        alike(end(engine, SPECS["few tokens"]), alone["few tokens"])
