"""Engines of models in budgets, which nothing is compiled for, and what they take."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.shapes import SHAPES
from jdllm.byte_sizes import parse_bytes
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError, RequestError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import HOPPER
from jdllm.planning.budget import Budget
from jdllm.planning.card import described_card
from jdllm.planning.offloading import account_with_offloading
from jdllm.serving.build import make_engine
from jdllm.serving.causal.request import causal_spec
from jdllm.serving.engine import Engine
from jdllm.serving.spec import generation_spec

MIB = 2**20
GEN_LENGTH = 32
CARD = described_card("h200")
SMALL = dataclasses.replace(
    SHAPES["llada-8b"],
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=4096,
    mask_id=4000,
    bos_id=1,
    eos_id=2,
    eot_id=None,
)
TALL = dataclasses.replace(SMALL, num_layers=48)
MODELS = {
    **SHAPES,
    "small": SMALL,
    "tall": TALL,
    "causal": dataclasses.replace(SHAPES["dream-7b"], attention="causal"),
}


class Device(NamedTuple):
    """A model in a budget, and what an engine was asked for."""

    name: str
    budget: Budget
    sizes: tuple[tuple[str, Any], ...]

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.name]


@functools.cache
def engine_of(device: Device, **options: Any) -> Engine:
    """One that nothing is compiled for; raises `ConfigError` where there is none."""
    account = account_with_offloading(
        device.config, "bfloat16", device.budget, device=HOPPER, **{**dict(device.sizes), **options}
    )
    leaf = jax.ShapeDtypeStruct((1,), np.dtype("bfloat16"))
    params: Any = {"embed": leaf, "final_norm": leaf}
    if device.config.attention == "block_causal":
        params = abstract_params(device.config, "bfloat16")
    return make_engine(params, device.config, Executables("cpu"), account)


def takes(device: Device, tokens: int, sampling: SamplingParams, **options: Any) -> bool:
    """Whether an engine takes a request of so many tokens."""
    prompt = np.full(tokens - GEN_LENGTH, 5, np.int32)
    make = causal_spec if device.config.attention == "causal" else generation_spec
    spec = make(prompt, sampling, device.config)
    try:
        engine = engine_of(device, **{name: parse_bytes(value) for name, value in options.items()})
        engine.abort(engine.add(spec))
    except (ConfigError, RequestError):
        return False
    return True
