"""Causal generation on a card: recorded runs in f32; in bf16, by our kernels, tokens near the best."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.serving.demands import Kind
from tests.causal import test_recorded as recorded
from tests.causal.conftest import golden, llm  # noqa: F401  # fixtures

pytestmark = pytest.mark.gpu

SMALL = dataclasses.replace(
    CAUSAL_SHAPES["llama-3.1-8b"],
    num_layers=3,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=2,
    intermediate_size=2048,
)
runs = recorded.runs


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


def test_greedy_runs(llm: LLM, runs: tuple[list[np.ndarray], list[list[int]]]):  # noqa: F811
    recorded.test_all_together(llm, runs)


@pytest.mark.parametrize("window", [None, 200])
def test_tokens_in_bf16(window: int | None):
    """In parts, behind what is stored, and across pages: a whole evaluation prefers nothing by far."""
    config = dataclasses.replace(SMALL, sliding_window=window)
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    rng = np.random.default_rng(0)
    system = rng.integers(2, 1000, 300)
    prompts = [np.concatenate([system, rng.integers(2, 1000, n)]) for n in (700, 5, 64, 1)]
    sampling = SamplingParams(max_tokens=80, early_stop=False)
    with LLM(model, max_num_batched_tokens=512, kv_pool="256MiB", progress=False) as llm:  # noqa: F811
        llm.generate(prompt_token_ids=[system], sampling=sampling)
        outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
        assert [output.num_cached_tokens for output in outputs] == [256] * 4
        for prompt, output in zip(prompts, outputs, strict=True):
            whole = np.concatenate([prompt, output.token_ids])
            logits = llm.logits(whole[None])[0, len(prompt) - 1 : -1]
            chosen = np.take_along_axis(logits, np.array(output.token_ids)[:, None], axis=1)[:, 0]
            assert (logits.max(axis=1) - chosen < 0.05 * logits.std(axis=1)).all()


@pytest.mark.parametrize("window", [None, 200])
def test_layer_by_layer(window: int | None):
    """Prompts in several chunks, beside the pool: tokens near the best, the first one the pool's."""
    config = dataclasses.replace(SMALL, sliding_window=window)
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    prompts = [np.random.default_rng(n).integers(2, 1000, n) for n in (3000, 20000)]
    sampling = SamplingParams(max_tokens=40, early_stop=False)
    found = []
    for pool in ("1GiB", "2MiB"):
        with LLM(model, max_num_batched_tokens=2048, kv_pool=pool, progress=False) as llm:  # noqa: F811
            outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
            layered = llm.engine.stats().parts[Kind.LAYERED]
            assert (layered > 0) == (pool == "2MiB")
            found.append([output.token_ids for output in outputs])
            whole = np.concatenate([prompts[0], outputs[0].token_ids])
            logits = llm.logits(whole[None])[0, len(prompts[0]) - 1 : -1]
            chosen = np.take_along_axis(logits, np.array(outputs[0].token_ids)[:, None], axis=1)[:, 0]
            assert (logits.max(axis=1) - chosen < 0.05 * logits.std(axis=1)).all()
    for paged, layered in zip(*found, strict=True):
        assert paged[0] == layered[0]
