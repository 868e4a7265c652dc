"""Long contexts by the kernels of a card: close to float32, also where what is stored is read again."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.shapes import SHAPES
from jdllm import LLM, LongPrompt, Prefilling, SamplingParams, Transformer
from jdllm.decoding.prefilling import Build

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(SHAPES["dream-7b"], num_layers=6)
POOL = "1GiB"
"""Others test on the card at the same time."""

CUT: dict[str, Any] = {"chunk_length": 256, "chunks_kept": 3}
RNG = np.random.default_rng(0)
CONTEXT = RNG.integers(2, 70_000, 4000)


@pytest.fixture(scope="module")
def full() -> Transformer:
    assert jax.default_backend() == "gpu", "this lane needs a card"
    return Transformer(CONFIG, rngs=nnx.Rngs(0), dtype="float32")


@pytest.fixture(scope="module")
def exact(full: Transformer) -> Iterator[LLM]:
    """In float32 by portable forms."""
    with LLM(full, max_num_batched_tokens=2048, kv_pool=POOL, kernels="xla", progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(full: Transformer) -> Iterator[LLM]:
    params = jax.tree.map(lambda x: x.astype("bfloat16"), full.params())
    with LLM(Transformer(CONFIG, params), max_num_batched_tokens=2048, kv_pool=POOL, progress=False) as llm:
        yield llm


def question(seed: int) -> LongPrompt:
    query = np.random.default_rng(seed).integers(2, 70_000, 40)
    return LongPrompt(instruction=CONTEXT[:30], context=CONTEXT, query=query)


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(
        gen_length=48, block_length=32, early_stop=False, prefilling=Prefilling(**CUT | options)
    )


@pytest.mark.parametrize("mask", ["causal", "full", "none"])
def test_scores_are_close_to_those_in_float32(llm: LLM, exact: LLM, mask: str):
    asked = sampling(score_mask=mask)
    mine, right = (one.generate(question(1), asked)[0].prefilling for one in (llm, exact))
    assert mine is not None and right is not None  # noqa: PT018
    np.testing.assert_allclose(mine.scores, right.scores, rtol=0.01)


def test_a_second_question_reads_what_is_stored(llm: LLM, exact: LLM):
    asked = sampling()
    llm.generate(question(1), asked)
    again, right = (one.generate(question(2), asked)[0].prefilling for one in (llm, exact))
    assert again is not None and right is not None  # noqa: PT018
    assert again.cached_chunks == len(again.scores)
    np.testing.assert_allclose(again.scores, right.scores, rtol=0.01)


@pytest.mark.parametrize(
    ("build", "retention"),
    [*itertools.product(get_args(Build), [None]), ("full_mask", "global"), ("chunk_query", "per_head")],
)
def test_every_build_answers_with_values_close_to_float32(
    llm: LLM, exact: LLM, build: str, retention: str | None
):
    thinned: dict[str, Any] = {} if retention is None else {"tokens_kept": 100, "retention": retention}
    asked = dataclasses.replace(sampling(build=build, **thinned), logprobs=True)
    mine, right = (one.generate(question(3), asked)[0] for one in (llm, exact))
    assert len(mine.token_ids) == 48
    # The first token is chosen after everything that is stored has been read; then texts may part.
    assert mine.logprobs is not None and right.logprobs is not None  # noqa: PT018
    assert mine.logprobs[0] == pytest.approx(right.logprobs[0], abs=0.3)
