"""Blocks that are entered before the host has seen the tokens of the blocks before: tokens are the same."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.serving.blocks.infill import block_infill_spec
from jdllm.serving.blocks.request import BlockRequest, BlockSpec, block_spec
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, mask_id_of
from jdllm.serving.updates import Ended
from tests.blocks import oracle
from tests.blocks.conftest import scored_of
from tests.blocks.oracle import Logits
from tests.blocks.recorded import FAST_DLLM_V2, SDAR, sdar_runs
from tests.blocks.test_infill import shifted_logits
from tests.causal.running import Build
from tests.engines import engine_of, finish
from tests.evaluations import note_parts
from tests.helpers import Golden, slow

FREE = SamplingParams(gen_length=16, block_length=4, steps=4, early_stop=False, return_history=True)
"""A step fills a block."""

PAGES = 8
"""Of a pool in which two requests of three pages have room."""


@pytest.fixture
def shared(build: Build, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that clients share, in which every step takes longer than the host does between two parts."""
    monkeypatch.setattr("jdllm.serving.scheduler.HOST_SECONDS", 0.0)
    engine = build()
    engine.scheduler.share()
    return engine


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(0, 300, length).astype(np.int32)


def run(engine: Engine, specs: Sequence[BlockSpec], **options: Any) -> list[Request]:
    return finish(engine, [BlockRequest(spec) for spec in specs], **options)[1]


def check(request: Request, logits_of: Logits) -> None:
    """Each step of a request that generates is that of the oracle, up to its end."""
    spec, masks = request.spec, request.returned.stop - request.returned.start
    assert isinstance(spec, BlockSpec)
    steps, length = len(spec.blocks[0].table.quota), spec.block_length
    states = oracle.generate(logits_of, request.prompt, masks, length, request.mask_id, steps=steps)
    assert len(request.history) == request.steps
    np.testing.assert_array_equal(request.history, states[: request.steps])
    if not request.sampling.early_stop:
        assert request.steps == len(states)


def test_a_block_is_entered_before_the_host_has_seen_the_one_before(
    build: Build, config: ModelConfig, logits_of: Logits, monkeypatch: pytest.MonkeyPatch
):
    """Nobody shares the engine; prompts end inside of blocks and at their ends."""
    engine = build()
    found = note_parts(engine, Kind.REUSE, monkeypatch)
    for request in run(engine, [block_spec(prompt(9 + i, i), FREE, config) for i in range(4)]):
        check(request, logits_of)
    assert found == [(4, 0), (4, 4), (4, 4), (4, 4), (3, 3)]  # three begin inside of a block


def test_nobody_waits_but_for_the_first_step_where_steps_are_long(
    shared: Engine, config: ModelConfig, logits_of: Logits, monkeypatch: pytest.MonkeyPatch
):
    found = note_parts(shared, Kind.REUSE, monkeypatch)
    [request] = run(shared, [block_spec(prompt(8), FREE.changed(steps=12), config)])
    check(request, logits_of)
    assert found == [(1, 0)] + [(1, 1)] * 11


def test_several_steps_of_a_block_are_one_part_where_nobody_shares_the_engine(
    build: Build, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    """Such a part leaves no tokens. The step that stores a block is a part of its own."""
    engine = build()
    found = note_parts(engine, Kind.REUSE, monkeypatch)
    run(engine, [block_spec(prompt(8), FREE.changed(steps=16), config)])
    assert found == [(1, 0)] * 8


def drawn(rng: np.random.Generator, config: ModelConfig) -> BlockSpec:
    """Blocks of some lengths, in few steps or many; a long prompt is stored in parts before."""
    length, blocks = int(rng.choice([4, 8, 16])), int(rng.integers(1, 6))
    steps = int(rng.choice([1, 2, length // 2, length]))
    asked = FREE.changed(gen_length=length * blocks, block_length=length, steps=steps * blocks)
    return block_spec(prompt(int(rng.integers(1, 150)), int(rng.integers(100))), asked, config)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_any_company(
    shared: Engine,
    build: Build,
    config: ModelConfig,
    logits_of: Logits,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
):
    rng = np.random.default_rng(seed)
    engine = shared if seed % 2 == 0 else build()
    found = note_parts(engine, Kind.REUSE, monkeypatch)
    specs = [drawn(rng, config) for _ in range(9)]
    for request in run(engine, specs, updates=("later", "every", "none")[seed % 3]):
        check(request, logits_of)
    assert any(waiting for _, waiting in found)
    assert engine.stats().free_pages == engine.stats().pages


def test_recorded_runs(shared: Engine, config: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    """Some end by a token in the middle, and of some a threshold decides how long a block takes."""
    found, runs = note_parts(shared, Kind.REUSE, monkeypatch), sdar_runs()
    recorded = scored_of(SDAR).llm
    specs = [block_spec(one.prompt, one.sampling, recorded.config) for one in runs]
    table = [i for i, one in enumerate(runs) if one.sampling.transfer != "dynamic"]
    for chosen in (table, range(len(runs))):
        requests = run(shared, [specs[i] for i in chosen])
        for request, i in zip(requests, chosen, strict=True):
            history, states = np.array(request.history), runs[i].states
            width = min(states.shape[1], history.shape[1])
            np.testing.assert_array_equal(history[:, :width], states[:, :width], runs[i].name)
    assert sum(waiting for _, waiting in found) > 20


def text_of(request: Request) -> list[int]:
    end = request.end_of_text()
    return request.tokens[request.returned][: None if end is None else end + 1].tolist()


def test_what_was_entered_behind_the_end_of_a_text_is_forgotten(
    build: Build, config: ModelConfig, logits_of: Logits
):
    """The text ends in the block that ends a page. Who waits for the pages gets them while a step behind the
    end still runs, and the next turn finds no block that was entered behind the end."""
    free = FREE.changed(gen_length=100, steps=25)
    [whole] = run(build(pages=PAGES), [block_spec(prompt(43), free, config)])
    text, at = text_of(whole), 20
    assert text.index(text[at]) == at
    engine, ended = build(pages=PAGES), free.changed(early_stop=True, stop_token_ids=[text[at]])
    requests = run(engine, [block_spec(ids, ended, config) for ids in (prompt(43), prompt(70), prompt(41))])
    assert text_of(requests[0]) == text[: at + 1]
    assert requests[0].computed == 43 + at + 1 - 4
    for request in requests:
        check(request, logits_of)
    assert engine.stats().free_pages == engine.stats().pages
    turn = np.concatenate([prompt(43), text[: at + 1], prompt(9, 1)]).astype(np.int32)
    [request] = run(engine, [block_spec(turn, FREE, config)])
    assert request.found == 0  # the last block of the page was stored by the step that was forgotten
    check(request, logits_of)


def until_ahead(engine: Engine, specs: Sequence[RequestSpec], then: Callable[[], None]) -> list[Ended]:
    """How requests ended, where something happens once some wait for tokens, before these are submitted."""
    ended, submit, waiting = list[Ended](), engine.runner.submit, 0
    for spec in specs:
        engine.add(spec, deliver=lambda x: ended.append(x) if isinstance(x, Ended) else None)

    def watched(kind: Kind, requests: list[Request], max_steps: int) -> Any:
        nonlocal waiting
        waiting += all(request.awaited is not None for request in requests)
        if waiting == 2:
            waiting += 1
            then()
        return submit(kind, requests, max_steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "submit", watched)
        while not engine.idle:
            engine.step()
    assert waiting > 2
    return ended


def test_who_is_aborted_changes_nothing_for_others(build: Build, config: ModelConfig, logits_of: Logits):
    """Who waits for the pages of the aborted one gets them while a step of it is in flight."""
    engine = build(pages=PAGES)
    specs = [block_spec(prompt(100 + i, i), FREE.changed(gen_length=32, steps=8), config) for i in range(6)]
    ended = until_ahead(engine, specs, lambda: engine.abort(engine.scheduler.running[0]))
    assert len(ended) == 5
    for end in ended:
        assert end.error is None
        check(end.state, logits_of)
    assert engine.stats().free_pages == engine.stats().pages


def test_a_part_that_cannot_be_packed_is_packed_later(build: Build, config: ModelConfig, logits_of: Logits):
    def refuse() -> None:
        raise RuntimeError("nothing can be packed now")

    ended = until_ahead(build(), [block_spec(prompt(9 + i, i), FREE, config) for i in range(3)], refuse)
    assert len(ended) == 3
    for end in ended:
        assert end.error is None
        check(end.state, logits_of)


def test_a_failure_ends_the_requests_of_its_part(
    build: Build, config: ModelConfig, logits_of: Logits, monkeypatch: pytest.MonkeyPatch
):
    """The next part has been submitted and is forgotten; who comes later finds nothing of these."""
    engine = build()
    collect = engine.runner.collect

    def failing(pending: Any) -> Any:
        monkeypatch.setattr(engine.runner, "collect", collect)
        collect(pending)
        raise RuntimeError("the part failed")

    specs = [block_spec(prompt(60 + i, i), FREE, config) for i in range(3)]
    ended = until_ahead(engine, specs, lambda: monkeypatch.setattr(engine.runner, "collect", failing))
    assert [str(end.error) for end in ended] == ["the part failed"] * 3
    for request in run(engine, specs):
        check(request, logits_of)


@pytest.mark.parametrize("golden", [SDAR, slow(FAST_DLLM_V2)])
@pytest.mark.usefixtures("shared")
def test_masks_inside_a_text_and_small_blocks(
    golden: Golden, executables: Executables, monkeypatch: pytest.MonkeyPatch
):
    """Given blocks between two with masks are stored with the awaited one. With shifted logits only small
    blocks of the same block are entered, the others wait for the token that their store gives."""
    llm, logits_of = scored_of(golden)
    shifted, mask_id = llm.config.logits_shift, mask_id_of(llm.config)
    params = load_params(golden.directory, llm.config, "float32")
    engine = engine_of(params, llm.config, executables, 128, pages=40)
    engine.scheduler.share()
    text = prompt(44, 5)
    text[[9, 10, 13, 14, 22, 32, 33, 36, 38]] = mask_id
    sampling = FREE.changed(block_length=8, small_block_length=4, steps=5)
    found = note_parts(engine, Kind.REUSE, monkeypatch)
    [request] = run(engine, [block_infill_spec(text, sampling, llm.config)])
    logits_of = shifted_logits(logits_of) if shifted else logits_of
    states = oracle.infill(logits_of, text, 8, mask_id, steps=1, small=4, foretold=shifted)
    np.testing.assert_array_equal([state[:44] for state in request.history], [state[:44] for state in states])
    assert sum(waiting for _, waiting in found) == (2 if shifted else 4)
