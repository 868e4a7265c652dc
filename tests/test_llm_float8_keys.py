"""`LLM(kv_cache_dtype="fp8")`: answers are those of NumPy where stored keys and values are rounded."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jdllm.checkpoints.loading import load_params
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params
from jdllm.serving.blocks.request import BlockRequest, BlockSpec, block_spec
from jdllm.stored_rows import Float8Rows
from tests.blocks import oracle
from tests.blocks.recorded import SDAR
from tests.causal.running import prompt
from tests.conftest import LLADA
from tests.engines import engine_of, finish
from tests.helpers import GOLDENS
from tests.models import numpy_transformer
from tests.rounding import rounded_as_stored

SMALL: dict[str, Any] = {"max_num_batched_tokens": 128, "kv_pool": "4MiB", "progress": False}
F32 = jnp.dtype("float32")


def model_of(directory: Path) -> tuple[ModelConfig, Params]:
    config = config_from_hf(directory)
    return config, load_params(directory, config, "float32")


def sees(config: ModelConfig, length: int) -> np.ndarray:
    """Which rows each row of a sequence sees."""
    start, end = (np.asarray(x)[:, None] for x in key_ranges(config, 0, length))
    return (start <= np.arange(length)) & (np.arange(length) < end)


@pytest.mark.parametrize("family", ["llama", "mistral_swa"])
@pytest.mark.slow
def test_a_causal_model_against_numpy(family: str):
    """Prompts in several parts, in company and alone: what a row sees is rounded, whoever evaluates it."""
    (config, params), asked = model_of(GOLDENS / family), [prompt(n) for n in (150, 9, 70)]
    sampling = SamplingParams(max_tokens=5, early_stop=False, logprobs=0)

    def likeliest(tokens: np.ndarray, stored: int) -> tuple[np.ndarray, np.ndarray]:
        """The token behind each, and its log-probability."""
        seen = {"sees": sees(config, len(tokens)), "stored": stored}
        found = log_softmax(numpy_transformer.logits(params, config, tokens, **seen), axis=1)
        return found.argmax(axis=1), found.max(axis=1)

    with LLM(GOLDENS / family, kv_cache_dtype="fp8", **SMALL) as llm:
        together = llm.generate(prompt_token_ids=asked, sampling=sampling)
        alone = [llm.generate(prompt_token_ids=[ids], sampling=sampling)[0] for ids in asked]
    for ids, out, same in zip(asked, together, alone, strict=True):
        before = np.concatenate([ids, out.token_ids[:-1]])
        tokens, logprobs = (x[len(ids) - 1 :] for x in likeliest(before, stored=len(before)))
        assert list(out.token_ids) == list(same.token_ids) == tokens.tolist()
        np.testing.assert_allclose(np.array(out.logprobs, np.float64), logprobs, atol=2e-4)
        plain = likeliest(before, stored=0)[1][len(ids) - 1 :]
        assert np.abs(plain - logprobs).max() > 2e-3


@pytest.mark.slow
def test_a_block_model_against_numpy():
    """Finished blocks are rounded, stored alone or with the next step, and the block behind them is not."""
    config, params = model_of(SDAR.directory)
    rounding = dataclasses.replace(config, kv_cache_dtype="fp8")
    sampling = SamplingParams(gen_length=16, block_length=8, early_stop=False, return_history=True)

    def logits_of(tokens: np.ndarray, block_length: int) -> np.ndarray:
        own = dataclasses.replace(config, block_length=block_length)
        seen = {"sees": sees(own, len(tokens)), "stored": len(tokens) - block_length}
        return numpy_transformer.logits(params, config, tokens, **seen)

    def run(specs: list[BlockSpec]) -> list[Any]:
        engine = engine_of(params, rounding, Executables("cpu"), 128, pages=20)
        return finish(engine, [BlockRequest(spec) for spec in specs])[1]

    specs = [block_spec(prompt(n) % 300, sampling, rounding) for n in (130, 5, 64)]
    for request, alone in zip(run(specs), [run([spec])[0] for spec in specs], strict=True):
        masks = request.returned.stop - request.returned.start
        asked = request.prompt, masks, request.block_length, request.mask_id
        np.testing.assert_array_equal(request.history, oracle.generate(logits_of, *asked))
        np.testing.assert_array_equal(request.history, alone.history)


@pytest.mark.parametrize("cache", ["dual", "head_sparse"])
@pytest.mark.slow
def test_a_refresh_stores_rounded_rows(cache: str):
    """A refresh stores keys and values of the rows beside its block, and they see each other as they are."""
    config, params = model_of(LLADA.directory)
    sampling = SamplingParams(gen_length=8, block_length=8, cache=cache, early_stop=False)
    pools = []
    for form in ("auto", "fp8"):
        with LLM(Transformer(config, params), kv_cache_dtype=form, **SMALL) as llm:
            llm.generate(prompt_token_ids=[prompt(70)], sampling=sampling)
            assert llm.engine.pool.arrays is not None
            pools.append(llm.engine.pool.arrays)
            assert sum(x.nbytes for x in jax.tree.leaves(pools[-1])) == llm.account.pool_bytes
    for plain, rounded in zip(*pools, strict=True):
        assert isinstance(rounded, Float8Rows)
        pages = min(plain.shape[1], rounded.shape[1])
        expected = rounded_as_stored(np.asarray(plain[:, 1:pages]))
        found = np.asarray(rounded.wide(F32))[:, 1:pages]
        assert expected.any()
        # A sum in another order may lie on the other side of a bound between two numbers.
        assert (found == expected).mean() > 0.999


@pytest.mark.slow
@pytest.mark.usefixtures("shared_executables")
def test_cached_requests_are_the_same_alone_and_in_company():
    options: list[dict[str, Any]] = [
        {"cache": "prefix"},
        {"cache": "dual", "temperature": 0.8, "seed": 3},
        {"cache": "sparse", "retention": 0.4, "pool_kernel": 5},
    ]
    plain = SamplingParams(gen_length=16, block_length=8, early_stop=False, return_history=True)
    prompts, sampling = [prompt(n) for n in (5, 70, 33)], [plain.changed(**given) for given in options]
    with LLM(LLADA.directory, kv_cache_dtype="fp8", **SMALL) as llm:
        together = llm.generate(prompt_token_ids=prompts, sampling=sampling)
        for ids, asked, expected in zip(prompts, sampling, together, strict=True):
            (alone,) = llm.generate(prompt_token_ids=[ids], sampling=asked)
            np.testing.assert_array_equal(alone.history, expected.history)
