"""The recorded causal models, and engines for two of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.compiling.executables import Executables
from jdllm.execution.transformer import forward, logits
from jdllm.llm import LLM
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params
from tests.causal.running import Build, Oracle
from tests.engines import engine_of
from tests.helpers import Golden

SLOW = pytest.mark.slow
FAMILIES = (
    "mistral_swa",
    *(pytest.param(name, marks=SLOW) for name in ("llama", "llama31_rope", "mistral", "qwen2")),
)


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture(scope="module")
def llm(golden: Golden) -> LLM:
    return LLM(golden.directory, max_num_batched_tokens=256, kv_pool="8MiB", progress=False)


@pytest.fixture(scope="module", params=["llama", pytest.param("mistral_swa", marks=SLOW)])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return config_from_hf(Golden(request.param).directory)


@pytest.fixture(scope="module")
def params(config: ModelConfig) -> Params:
    return load_params(
        Golden("llama" if config.sliding_window is None else "mistral_swa").directory, config, "float32"
    )


@pytest.fixture(scope="module")
def oracle(config: ModelConfig, params: Params) -> Oracle:
    """Logits behind the last of some tokens, from an evaluation of all of them at once."""

    @jax.jit
    def run(tokens: jax.Array, last: jax.Array) -> jax.Array:
        length = len(tokens)
        rows = Rows(np.arange(length), *key_ranges(config, 0, length))
        return logits(params, config, forward(params, config, tokens, rows)[last][None])[0]

    def of(tokens: np.ndarray) -> np.ndarray:
        padded = np.zeros(-(-len(tokens) // 128) * 128, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(run(jnp.asarray(padded), jnp.int32(len(tokens) - 1)))

    return of


@pytest.fixture
def build(params: Params, config: ModelConfig, executables: Executables) -> Build:
    return lambda rows=256, pages=40, **options: engine_of(
        params, config, executables, rows, pages=pages, **options
    )
