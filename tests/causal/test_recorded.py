"""Greedy runs of causal models, as transformers recorded them."""

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.helpers import Golden

GREEDY = SamplingParams(max_tokens=32, early_stop=False, logprobs=True)


def recorded(golden: Golden) -> tuple[list[np.ndarray], list[list[int]]]:
    """Prompts without padding, and the tokens behind each."""
    tensors, prompts, answers = golden.tensors(), [], []
    for case in sorted({name.split(".")[0] for name in tensors if name.endswith(".output")}):
        mask, output = tensors[f"{case}.attention_mask"], tensors[f"{case}.output"]
        for ids, keep in zip(output, mask, strict=True):
            prompts.append(ids[: len(keep)][keep == 1])
            answers.append(ids[len(keep) :].tolist())
    return prompts, answers


@pytest.fixture(scope="module")
def runs(golden: Golden) -> tuple[list[np.ndarray], list[list[int]]]:
    return recorded(golden)


def test_all_together(llm: LLM, runs: tuple[list[np.ndarray], list[list[int]]]):
    prompts, answers = runs
    assert len(prompts) == 7
    outputs = llm.generate(prompt_token_ids=prompts, sampling=GREEDY)
    assert [output.token_ids for output in outputs] == answers
