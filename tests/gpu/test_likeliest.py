"""The likeliest ids beside each token on a card: by its kernels as by portable forms, beside others."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from flax import nnx

from benchmarks.shapes import SHAPES
from jdllm import LLM, SamplingParams, Transformer
from jdllm.outputs import RequestOutput

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(SHAPES["llada-8b"], num_layers=2)
POOL = "1GiB"
"""Others test on the card at the same time."""

PROMPTS = [np.random.default_rng(n).integers(0, 60_000, 200 + n) for n in range(3)]
ROUNDING = 0.3
"""What log-probabilities of two forms in bfloat16 may differ by."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(CONFIG, rngs=nnx.Rngs(0), dtype="bfloat16")


@pytest.fixture(scope="module")
def llms(model: Transformer) -> Iterator[dict[str, LLM]]:
    """One for each choice of kernels, which keeps its executables for the tests after the first."""
    with contextlib.ExitStack() as stack:
        yield {
            kernels: stack.enter_context(
                LLM(model, max_num_batched_tokens=1024, kv_pool=POOL, kernels=kernels)
            )
            for kernels in ("auto", "triton", "xla")
        }


def outputs_of(llm: LLM, asked: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompt_token_ids=PROMPTS, sampling=asked)


def asked(**options: object) -> list[SamplingParams]:
    """Of the second one nothing is listed: the kernel of the head takes its rows."""
    silent = SamplingParams(**{"gen_length": 32, "block_length": 16, "early_stop": False, **options})
    return [silent.changed(logprobs=20), silent, silent.changed(logprobs=5, temperature=0.7, seed=3)]


def tops(output: RequestOutput) -> list[dict[int, float]]:
    assert output.top_logprobs is not None
    return [top for top in output.top_logprobs if top is not None]


@pytest.mark.parametrize("kernels", ["auto", "triton"])
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_kernels_list_what_portable_forms_do(kernels: str, cache: str, llms: dict[str, LLM]):
    """A step commits a whole block: the first block of both is chosen from the same tokens."""
    options = asked(steps=2, cache=cache)
    mine, theirs = (outputs_of(llms[chosen], options)[0] for chosen in (kernels, "xla"))
    for ours, portable in zip(tops(mine)[:16], tops(theirs)[:16], strict=True):
        common = ours.keys() & portable.keys()
        assert len(common) >= 15, "those behind the likeliest are close"
        assert [ours[id] for id in common] == pytest.approx([portable[id] for id in common], abs=ROUNDING)


@pytest.mark.parametrize("kernels", ["auto", "triton", "xla"])
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_chosen_tokens_are_among_them(kernels: str, cache: str, llms: dict[str, LLM]):
    outputs = outputs_of(llms[kernels], asked(steps=32, cache=cache))
    assert outputs[1].top_logprobs is None
    for output, count in ((outputs[0], 20), (outputs[2], 5)):
        assert output.logprobs is not None
        for token, logprob, top in zip(output.token_ids, output.logprobs, tops(output), strict=True):
            values = list(top.values())[:count]
            assert values == sorted(values, reverse=True)
            assert top[token] == logprob
            assert count <= len(top) <= count + 1
            assert count < 20 or next(iter(top)) == token, "the first one was drawn without noise"
