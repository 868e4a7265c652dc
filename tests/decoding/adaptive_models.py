"""Small models for adaptive parallel decoding, with their verifiers."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.rotary import RopeConfig
from tests.decoding.slow_adaptive import Models

VOCAB, MASK = 300, 299
LLADA = ModelConfig(
    family="llada",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=512,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10000.0),
    mask_id=MASK,
)
DREAM = dataclasses.replace(LLADA, family="dream", qkv_bias=True, logits_shift=True)
CAUSAL = dataclasses.replace(
    DREAM, family="qwen2", attention="causal", logits_shift=False, mask_id=None, num_kv_heads=1
)
PROMPTS = [np.random.default_rng(n).integers(0, 250, n).tolist() for n in (3, 11, 6)]


def tiny(config: ModelConfig, seed: int = 0, **scales: float) -> Transformer:
    """Random weights whose logits differ by about 1; those named in `scales` are scaled by it too."""
    weights = Transformer(config, rngs=nnx.Rngs(seed)).params()

    def scaled(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return leaf if leaf.ndim == 1 else leaf * 8 * scales.get(path[-1].key, 1.0)

    return Transformer(config, jax.tree.map_with_path(scaled, weights))


def wordwise(config: ModelConfig, head: Transformer | None = None) -> Transformer:
    """A model whose logits are the same at every position, those of `head` where it is given."""
    model = tiny(config, o=0.0, down=0.0)
    params = (head or model).params()
    one = jnp.broadcast_to(params["embed"][:1], (config.vocab_size, config.hidden_size))
    return Transformer(config, {**model.params(), "embed": one, "head": params["head"]})


class Pair(NamedTuple):
    """A diffusion model with its verifier, and both for the slow copy."""

    llm: LLM
    models: Models

    def generate(self, sampling: Any, prompts: list[list[int]] = PROMPTS, **options: Any):
        return self.llm.generate(prompt_token_ids=prompts, sampling=sampling, **options)


def pair_of(config: ModelConfig, verifier: Transformer | None = None, **options: Any) -> Pair:
    model = tiny(config)
    verifier = verifier or tiny(CAUSAL)
    llm = LLM(model, verifier=verifier, verifier_shares_ids=True, **options)
    plain = LLM(verifier)

    def padded(of: LLM, ids: np.ndarray) -> np.ndarray:
        return of.logits([ids.tolist()])[0]

    models = Models(
        functools.partial(padded, llm), functools.partial(padded, plain), MASK, config.logits_shift
    )
    return Pair(llm, models)
