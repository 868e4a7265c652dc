"""Long contexts by the kernels of a card: close to wider types, also where what is stored is read again."""

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
from jdllm.prefilling.prefilled import Prefilled
from tests.prefilling.oracle import chunks
from tests.prefilling.oracle_cache import (
    Layout,
    Retention,
    build_parts,
    build_whole,
    prefill_query,
    retention_scores,
)
from tests.prefilling.oracle_model import Model, log_softmax

pytestmark = pytest.mark.gpu

IDS = {"vocab_size": 16_384, "mask_id": 16_000, "bos_id": 16_001, "eos_id": 16_001, "eot_id": 16_002}
HALF: dict[str, Any] = {
    "hidden_size": 1792,
    "num_heads": 14,
    "num_kv_heads": 2,
    "intermediate_size": 9472,
    "num_layers": 4,
}
CONFIG = dataclasses.replace(SHAPES["dream-7b"], **HALF, **IDS)
"""Half as wide as Dream: float64 takes seconds."""
LENGTH, KEPT, WINDOW = 48, 100, 8
POOL = "1GiB"
"""Others test on the card at the same time."""

CUT: dict[str, Any] = {"chunk_length": 256, "chunks_kept": 3}
RNG = np.random.default_rng(0)
CONTEXT = RNG.integers(2, 16_000, 4000)


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
    query = np.random.default_rng(seed).integers(2, 16_000, 40)
    return LongPrompt(instruction=CONTEXT[:30], context=CONTEXT, query=query)


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(
        gen_length=LENGTH, block_length=32, early_stop=False, prefilling=Prefilling(**CUT | options)
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


@pytest.fixture(scope="module")
def oracle(full: Transformer) -> Model:
    """The model in NumPy float64, its weights rounded to those of `llm`."""
    params = jax.tree.map(lambda x: np.asarray(x.astype("bfloat16"), np.float64), full.params())
    layers = [{name: each[i] for name, each in params["layers"].items()} for i in range(CONFIG.num_layers)]
    ends = params["embed"], layers, params["final_norm"], params["head"]
    return Model(*ends, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.rope.theta, CONFIG.rms_norm_eps)


CHUNKS = [chunk.tokens for chunk in chunks(CONTEXT, CUT["chunk_length"], CONFIG.bos_id)]


def first_token(model: Model, asked: LongPrompt, told: Prefilled, build: Build) -> np.ndarray:
    """Log-probabilities of the answer's first token, given the chunks and tokens that were kept."""
    prefix, query = (np.asarray(part) for part in (asked.instruction, asked.query))
    parts = [CHUNKS[i] for i in told.selected]
    layout = Layout(len(prefix), CUT["chunk_length"], told.selected, "continuous", "after_selected_chunks")
    if build in ("full_mask", "full_query"):
        masks = np.full(LENGTH if build == "full_mask" else 0, CONFIG.mask_id)
        last = build_whole(model, prefix, parts, told.kept, query, masks, layout).query_logits
        assert last is not None
    else:
        window = np.concatenate([query, told.draft])[-WINDOW:]
        alone = build == "chunk_only"
        built = build_parts(model, prefix, parts, told.kept, window, "causal", layout, alone)
        last = prefill_query(model, built, query)[2]
    return log_softmax(last)


@pytest.mark.parametrize(
    ("build", "retention"),
    [*itertools.product(get_args(Build), [None]), ("full_mask", "global"), ("chunk_query", "per_head")],
)
def test_every_build_answers_with_values_close_to_float64(
    llm: LLM, oracle: Model, build: Build, retention: str | None
):
    thinned: dict[str, Any] = {} if retention is None else {"tokens_kept": KEPT, "retention": retention}
    asked = dataclasses.replace(sampling(build=build, **thinned), logprobs=True)
    prompt = question(3)
    mine = llm.generate(prompt, asked)[0]
    assert len(mine.token_ids) == LENGTH
    told = mine.prefilling
    assert told is not None
    # Which tokens are kept may differ by rounding where their scores are close, and every one of them moves
    # the answer: it is right for what was kept, and what was kept scores as high as the rest.
    right = first_token(oracle, prompt, told, build)
    assert mine.logprobs is not None
    assert mine.logprobs[0] == pytest.approx(right[mine.token_ids[0]], abs=0.1)
    assert right[mine.token_ids[0]] == pytest.approx(right.max(), abs=0.1)
    if retention is not None:
        instruction, query = np.asarray(prompt.instruction), np.asarray(prompt.query)
        rule = Retention(KEPT, WINDOW, per_head=retention == "per_head")
        for index, kept in zip(told.selected, told.kept, strict=True):
            scores = retention_scores(oracle, instruction, CHUNKS[index], query, rule)
            least = np.sort(scores, axis=-1)[..., -KEPT]
            reached = np.take_along_axis(scores, kept, axis=-1)[..., 1:].min(
                axis=-1
            )  # the first is always kept
            assert (reached >= 0.9 * least).all()
