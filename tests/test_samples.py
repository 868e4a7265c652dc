"""Samples of one prompt, their seeds, and the log-probabilities of their tokens."""

import dataclasses

import jax
import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.noise import sample_seed
from jdllm.serving.updates import StepUpdate

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
DRAWN = SamplingParams(gen_length=8, steps=4, temperature=1.0, seed=5)


class TestSamples:
    def test_each_is_the_request_of_its_own_seed(self, llm: LLM):
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling=dataclasses.replace(DRAWN, n=3))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert [sample.index for sample in output.outputs] == [0, 1, 2]
            for i, sample in enumerate(output.outputs):
                alone = dataclasses.replace(DRAWN, seed=sample_seed(5, i))
                (expected,) = llm.generate(prompt_token_ids=[prompt], sampling=alone)
                assert sample.token_ids == expected.token_ids
            assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3

    def test_the_first_is_the_one_that_there_is_without(self, llm: LLM):
        (one,) = llm.generate(prompt_token_ids=PROMPTS[:1], sampling=DRAWN)
        (three,) = llm.generate(prompt_token_ids=PROMPTS[:1], sampling=dataclasses.replace(DRAWN, n=3))
        assert (three.seed, three.outputs[0]) == (one.seed, one.outputs[0]) == (5, one.outputs[0])
        assert (three.token_ids, three.finish_reason, three.nfe) == (one.token_ids, "length", 4)

    def test_prompts_may_have_different_numbers(self, llm: LLM):
        sampling = [dataclasses.replace(DRAWN, n=n) for n in (2, 1)]
        updates: list[StepUpdate] = []
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling=sampling, on_step=updates.append)
        assert [len(output.outputs) for output in outputs] == [2, 1]
        assert [output.prompt_token_ids for output in outputs] == PROMPTS
        lengths = {u.request: int(u.positions[0]) for u in reversed(updates)}
        assert lengths == {0: 3, 1: 3, 2: 5}

    def test_infill_has_them_too(self, llm: LLM):
        sampling = SamplingParams(temperature=1.0, n=2, seed=3)
        (output,) = llm.infill(token_ids=[[1, 510, 510, 510]], sampling=sampling)
        first, second = (sample.token_ids for sample in output.outputs)
        assert first != second
        assert first[0] == second[0] == 1


class TestSeeds:
    def test_none_is_a_fresh_one_that_the_output_tells(self, llm: LLM):
        fresh = dataclasses.replace(DRAWN, seed=None)
        outputs = llm.generate(prompt_token_ids=[[1, 2, 3]] * 2, sampling=fresh)
        assert len({output.seed for output in outputs}) == 2
        for output in outputs:
            told = dataclasses.replace(DRAWN, seed=output.seed)
            assert llm.generate(prompt_token_ids=[[1, 2, 3]], sampling=told) == [output]


class TestLogProbabilities:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_are_those_of_the_committing_step(self, llm: LLM, temperature: float):
        sampling = SamplingParams(
            gen_length=8, steps=4, temperature=temperature, logprobs=True, return_history=True
        )
        (output,) = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling=sampling)
        assert output.history is not None
        assert output.logprobs is not None
        assert output.committed_in is not None
        states = np.concatenate([[[1, 2, 3] + [510] * 8], output.history])
        logprobs = np.asarray(jax.nn.log_softmax(llm.logits(states)))
        for position, (token, logprob, step) in enumerate(
            zip(output.token_ids, output.logprobs, output.committed_in, strict=True), start=3
        ):
            assert step is not None
            assert states[step, position] == 510
            assert states[step + 1, position] == token
            assert logprob == pytest.approx(logprobs[step, position, token], abs=1e-4)
