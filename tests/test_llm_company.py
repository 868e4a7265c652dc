"""Several calls of one `LLM` at a time, streams, and what is left after a call or a model."""

import pickle
import threading
from typing import Any

import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.outputs import RequestOutput
from jdllm.serving.updates import StepUpdate

pytestmark = pytest.mark.usefixtures("shared_executables")

DUAL = SamplingParams(gen_length=32, block_length=8, early_stop=False, cache="dual")
PROMPTS = [list(range(1, n)) for n in (9, 60)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [llm.generate(prompt_token_ids=[ids], sampling=DUAL)[0].token_ids for ids in PROMPTS]


def test_calls_from_several_threads_do_not_meet(llm: LLM, alone: list[list[int]]):
    found: dict[int, list[int]] = {}

    def call(i: int) -> None:
        found[i] = llm.generate(prompt_token_ids=[PROMPTS[i]], sampling=DUAL)[0].token_ids

    threads = [threading.Thread(target=call, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == alone


def test_a_call_inside_a_callback(llm: LLM, alone: list[list[int]]):
    inner: list[RequestOutput] = []

    def on_step(update: StepUpdate) -> None:
        if update.step == 3:
            inner.extend(llm.generate(prompt_token_ids=[PROMPTS[1]], sampling=DUAL))

    (outer,) = llm.generate(prompt_token_ids=[PROMPTS[0]], sampling=DUAL, on_step=on_step)
    assert [outer.token_ids, inner[0].token_ids] == alone


def test_a_stream_yields_every_step_and_each_output_once(llm: LLM, alone: list[list[int]]):
    steps: list[tuple[int, int]] = []
    outputs: list[RequestOutput] = []
    for update in llm.stream(prompt_token_ids=PROMPTS, sampling=DUAL):
        if isinstance(update, RequestOutput):
            outputs.append(update)
        else:
            steps.append((update.request, update.step))
    assert sorted(steps) == [(r, s) for r in (0, 1) for s in range(32)]
    assert sorted(o.token_ids for o in outputs) == sorted(alone)


def test_a_stream_that_is_left_leaves_nothing_behind(llm: LLM, alone: list[list[int]]):
    stream = llm.stream(prompt_token_ids=PROMPTS, sampling=DUAL)
    next(stream)
    del stream
    (output,) = llm.generate(prompt_token_ids=[PROMPTS[1]], sampling=DUAL)
    assert output.token_ids == alone[1]
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)


def test_a_mistake_in_a_stream_is_told_at_once(llm: LLM):
    with pytest.raises(Exception, match="outside the vocabulary"):
        llm.stream(prompt_token_ids=[[10**6]])


def test_an_exception_of_a_callback_ends_its_call_only(llm: LLM, alone: list[list[int]]):
    def on_step(update: StepUpdate) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(prompt_token_ids=PROMPTS, sampling=DUAL, on_step=on_step)
    assert llm.generate(prompt_token_ids=[PROMPTS[0]], sampling=DUAL)[0].token_ids == alone[0]


def test_outputs_survive_pickling(llm: LLM):
    sampling = DUAL.changed(return_history=True, logprobs=True)
    (output,) = llm.generate(prompt_token_ids=[PROMPTS[0]], sampling=sampling)
    assert pickle.loads(pickle.dumps(output)) == output


@pytest.mark.slow
def test_two_models_in_a_process(llm: LLM, params: Params, config: ModelConfig, alone: list[list[int]]):
    with LLM(Transformer(config, params), max_num_batched_tokens=64) as other:
        for model in (other, llm):
            assert model.generate(prompt_token_ids=[PROMPTS[0]], sampling=DUAL)[0].token_ids == alone[0]
    with pytest.raises(ConfigError, match="closed"):
        other.generate(prompt_token_ids=[PROMPTS[0]], sampling=DUAL)
    other.close()


def test_ids_of_updates_are_those_of_the_call(llm: LLM):
    seen: set[Any] = set()
    sampling = SamplingParams(gen_length=2, n=2, temperature=1.0, seed=1)
    llm.generate(prompt_token_ids=[[1], [2]], sampling=sampling, on_step=lambda u: seen.add(u.request))
    assert seen == {0, 1, 2, 3}
