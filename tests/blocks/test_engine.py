"""Block models in an engine: prompts in parts, company, shared pages, requests that leave."""

import contextlib
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.outputs import RequestOutput
from jdllm.serving.blocks.request import BlockRequest, BlockSpec, block_spec
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.updates import PartDone, StepUpdate
from tests.blocks import oracle
from tests.blocks.oracle import Logits
from tests.causal.running import Build
from tests.decoding.slow_rules import Rule
from tests.engines import engine_of, finish

FREE = SamplingParams(gen_length=16, block_length=8, early_stop=False, return_history=True)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(0, 300, length).astype(np.int32)


def run(engine: Engine, specs: Sequence[BlockSpec]) -> list[BlockRequest]:
    _, ended = finish(engine, [BlockRequest(spec) for spec in specs])
    return [request for request in ended if isinstance(request, BlockRequest)]


def _stream(llm: LLM, ids: np.ndarray, sampling: SamplingParams) -> Generator[StepUpdate | RequestOutput]:
    yield from llm.stream(prompt_token_ids=[ids], sampling=sampling)


def check(requests: Sequence[BlockRequest], logits_of: Logits, **rule: Any) -> None:
    """Each step of each request is that of the oracle."""
    for request in requests:
        masks = request.returned.stop - request.returned.start
        asked = request.prompt, masks, request.block_length, request.mask_id
        np.testing.assert_array_equal(request.history, oracle.generate(logits_of, *asked, **rule))


def test_long_prompts_in_parts(build: Build, config: ModelConfig, logits_of: Logits):
    """Parts of 64 rows, blocks that begin and end inside of pages, and prompts that end everywhere."""
    engine, parts = build(), list[PartDone]()
    engine.observe = parts.append
    sampling = [FREE, FREE.changed(block_length=32), FREE.changed(block_length=4, gen_length=9)]
    asked = [(prompt(n, i), sampling[i % 3]) for i, n in enumerate((200, 150, 1, 64, 127, 8, 63))]
    requests = run(engine, [block_spec(*one, config) for one in asked])
    check(requests, logits_of)
    stored = [part.rows for part in parts if part.kind is Kind.PREFILL]
    assert max(stored) <= 128
    assert engine.stats().free_pages == engine.stats().pages


@pytest.mark.parametrize("rule", [Rule.DYNAMIC, Rule.THRESHOLD])
def test_rules(build: Build, config: ModelConfig, logits_of: Logits, rule: Rule):
    sampling = FREE.changed(transfer=rule.value, threshold=0.3)
    requests = run(build(), [block_spec(prompt(n), sampling, config) for n in (70, 13)])
    check(requests, logits_of, rule=rule, threshold=0.3)


def test_a_prompt_shorter_than_a_block(build: Build, config: ModelConfig, logits_of: Logits):
    check(run(build(), [block_spec(prompt(3), FREE.changed(gen_length=5), config)]), logits_of)


def test_no_prompt(sdar: LLM):
    """Rows of a block of masks alone differ by rounding only, so that no order is known."""
    [output] = sdar.generate(prompt_token_ids=[[]], sampling=FREE)
    assert output.nfe == len(output.token_ids) == 16
    assert 317 not in output.token_ids


@pytest.mark.slow
def test_draws_do_not_depend_on_company(build: Build, config: ModelConfig):
    sampling = [FREE.changed(temperature=1.0, seed=i, top_k=[None, 20][i % 2]) for i in range(5)]
    specs = [block_spec(prompt(30 * i + 5, i), one, config) for i, one in enumerate(sampling)]
    engine = build()
    together = run(engine, specs)
    alone = [run(engine, [spec])[0] for spec in specs]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.history, other.history)
    assert len({tuple(request.tokens[-16:].tolist()) for request in together}) == 5


def test_prompts_that_begin_alike_share_pages(build: Build, config: ModelConfig, logits_of: Logits):
    engine, system = build(), prompt(150)
    run(engine, [block_spec(system, FREE, config)])
    asked = [np.concatenate([system, prompt(n, 2)]) for n in (3, 50, 1)]
    requests = run(engine, [block_spec(ids, FREE, config) for ids in asked])
    assert [request.found for request in requests] == [128] * 3
    check(requests, logits_of)


def test_an_answer_is_found_by_the_next_turn(build: Build, config: ModelConfig, logits_of: Logits):
    engine = build()
    [first] = run(engine, [block_spec(prompt(60), FREE.changed(gen_length=80), config)])
    turn = np.concatenate([first.tokens, prompt(9, 3)])
    [second] = run(engine, [block_spec(turn, FREE, config)])
    assert second.found == 128  # the last block was not stored, nor is the rest of its page
    check([second], logits_of)


def test_blocks_of_another_length_share_nothing(build: Build, config: ModelConfig, logits_of: Logits):
    engine = build()
    for length in (8, 16):
        [request] = run(engine, [block_spec(prompt(150), FREE.changed(block_length=length), config)])
        assert request.found == 0
        check([request], logits_of)


def test_others_go_on_when_one_leaves(sdar: LLM):
    ids, sampling = [prompt(100), prompt(40, 1)], FREE.changed(return_history=False)
    expected = [output.token_ids for output in sdar.generate(prompt_token_ids=ids, sampling=sampling)]
    updates = sdar.stream(prompt_token_ids=ids, sampling=sampling)
    with contextlib.closing(_stream(sdar, prompt(90, 2), sampling)) as left:
        assert isinstance(next(left), StepUpdate)
        told = [next(updates)]
    told += updates
    ended = [update.token_ids for update in told if not isinstance(update, StepUpdate)]
    assert sorted(ended) == sorted(expected)
    assert sdar.engine.stats().free_pages == sdar.engine.stats().pages


def test_blocks_are_stored_beside_other_requests_steps(build: Build, config: ModelConfig, logits_of: Logits):
    """A pool that holds one request at a time."""
    engine = build(pages=5)
    requests = run(engine, [block_spec(prompt(180, i), FREE, config) for i in range(3)])
    check(requests, logits_of)


def test_steps_go_ahead_where_clients_share_the_engine(build: Build, config: ModelConfig, logits_of: Logits):
    engine = build()
    engine.scheduler.share()
    check(run(engine, [block_spec(prompt(60 + i, i), FREE, config) for i in range(3)]), logits_of)


def test_text_ends_with_its_block(sdar: LLM):
    sampling = FREE.changed(gen_length=40, return_history=False)
    [whole] = sdar.generate(prompt_token_ids=[prompt(20)], sampling=sampling)
    stop = whole.token_ids[11]
    at = whole.token_ids.index(stop)
    ended = sampling.changed(early_stop=True, stop_token_ids=[stop])
    [output] = sdar.generate(prompt_token_ids=[prompt(20)], sampling=ended)
    assert output.token_ids == whole.token_ids[: at + 1]
    assert output.nfe < whole.nfe


def test_sampling_for_all_blocks(sdar: LLM):
    """The block length of the model, and `max_tokens` inside a block."""
    inside = SamplingParams(max_tokens=6, early_stop=False)
    beyond = SamplingParams(gen_length=40, block_length=4, early_stop=False)
    [output] = sdar.generate(prompt_token_ids=[prompt(9)], sampling=inside)
    [whole] = sdar.generate(prompt_token_ids=[prompt(9)], sampling=beyond)
    assert output.token_ids == whole.token_ids[:6]


@pytest.mark.slow
def test_nothing_compiles_after_a_warm_up(params: Params, config: ModelConfig):
    executables = Executables("cpu")
    engine = engine_of(params, config, executables, 64, pages=20)
    engine.warm()
    compiled = executables.compiled
    sampling = [FREE, FREE.changed(transfer="dynamic", temperature=1.0, top_k=5)]
    run(engine, [block_spec(prompt(40 * i + 3), one, config) for i, one in enumerate(sampling * 2)])
    assert executables.compiled == compiled
    engine.close()


def test_steps_follow_their_store_without_the_host(build: Build, config: ModelConfig, logits_of: Logits):
    """The first block is packed before the host has seen that the prompt is stored."""
    engine, parts = build(), list[PartDone]()
    engine.observe = parts.append
    specs = [block_spec(prompt(160, i), FREE, config) for i in range(2)]
    check(run(engine, specs), logits_of)
    behind = [(a, b) for a, b in itertools.pairwise(parts) if a.kind is Kind.PREFILL and b.kind is Kind.REUSE]
    assert behind
    assert all(b.times.submitted < a.times.collected for a, b in behind)


def test_blocks_are_stored_with_the_next_step(build: Build, config: ModelConfig, logits_of: Logits):
    """A block costs no evaluation beside its steps, and others step beside requests that store."""
    engine, parts = build(), list[PartDone]()
    engine.observe = parts.append
    sampling = [FREE, FREE.changed(block_length=4, gen_length=9), FREE.changed(block_length=32)]
    specs = [block_spec(prompt(9 + i, i), one, config) for i, one in enumerate(sampling)]
    check(run(engine, specs), logits_of)
    assert {part.kind for part in parts} == {Kind.REUSE}
    assert engine.evaluated <= 32
