"""A recorded SDAR checkpoint, engines for it, and evaluations of whole sequences."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jdllm.checkpoints.loading import load_params
from jdllm.compiling.executables import Executables
from jdllm.execution.transformer import forward, logits
from jdllm.llm import LLM
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params
from jdllm.serving.spec import mask_id_of
from tests.blocks.lossy_oracle import SeenLogits
from tests.blocks.oracle import Logits
from tests.blocks.recorded import FAST_DLLM_V2, LLADA2, SDAR
from tests.causal.running import Build
from tests.engines import engine_of
from tests.helpers import Golden

BUCKET = 128


def llm_of(golden: Golden) -> LLM:
    """Not every `config.json` states the mask, and recorded runs have ends of their own."""
    return LLM(
        golden.directory,
        max_num_batched_tokens=256,
        kv_pool="8MiB",
        progress=False,
        hf_overrides={"mask_token_id": golden.json("goldens")["mask_id"], "eos_token_id": None},
    )


@pytest.fixture(scope="module")  # each holds compiled programs
def sdar() -> LLM:
    return llm_of(SDAR)


@pytest.fixture(scope="module")  # each holds compiled programs
def llada2() -> LLM:
    return llm_of(LLADA2)


@pytest.fixture(scope="module")  # each holds compiled programs
def fast_dllm_v2() -> LLM:
    return llm_of(FAST_DLLM_V2)


@pytest.fixture(scope="package")
def config() -> ModelConfig:
    return config_from_hf(SDAR.directory)


@pytest.fixture(scope="package")
def params(config: ModelConfig) -> Params:
    return load_params(SDAR.directory, config, "float32")


def seen_sequences(params: Params, config: ModelConfig) -> SeenLogits:
    """Logits of all tokens of a sequence of which each sees all before some row."""

    @jax.jit
    def run(tokens: jax.Array, rows: Rows) -> jax.Array:
        return logits(params, config, forward(params, config, tokens, rows))

    def of(tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
        missing = -len(tokens) % BUCKET
        rows = Rows(np.arange(len(tokens) + missing), np.zeros_like(ends), ends)
        rows = rows._replace(k_start=np.pad(rows.k_start, (0, missing)), k_end=np.pad(ends, (0, missing)))
        found = run(jnp.asarray(np.pad(tokens, (0, missing))), rows)
        return np.asarray(found)[: len(tokens)]

    return of


def whole_sequences(params: Params, config: ModelConfig) -> Logits:
    """Logits of all tokens of a sequence, from an evaluation of the whole of it."""
    seen_logits = seen_sequences(params, config)

    def of(tokens: np.ndarray, block_length: int) -> np.ndarray:
        own = dataclasses.replace(config, block_length=block_length)
        return seen_logits(tokens, key_ranges(own, 0, len(tokens))[1])

    return of


class Scored(NamedTuple):
    """A block model, and its logits by evaluations of whole sequences."""

    llm: LLM
    logits_of: Logits

    @property
    def mask_id(self) -> int:
        return mask_id_of(self.llm.config)

    def logprobs(self, tokens: np.ndarray, block_length: int) -> np.ndarray:
        """f64 log-probabilities `[length, vocab]` of the token at each position."""
        found = self.logits_of(tokens, block_length).astype(np.float64)
        if self.llm.config.logits_shift:
            found = np.concatenate([found[:1], found[:-1]])
        return log_softmax(found, axis=-1)


@functools.lru_cache(maxsize=2)  # each holds compiled programs
def scored_of(golden: Golden) -> Scored:
    llm = llm_of(golden)
    llm.scorer.warm()
    params = load_params(golden.directory, llm.config, "float32")
    return Scored(llm, whole_sequences(params, llm.config))


@pytest.fixture(scope="package")
def logits_of(params: Params, config: ModelConfig) -> Logits:
    return whole_sequences(params, config)


@pytest.fixture
def build(params: Params, config: ModelConfig, executables: Executables) -> Build:
    return lambda rows=128, pages=40, **options: engine_of(
        params, config, executables, rows, pages=pages, **options
    )
