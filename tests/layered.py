"""Engines whose pool is too small for a request with a cache, which runs layer by layer there."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, tree_bytes
from jdllm.pallas.device import CPU
from jdllm.planning.account import make_account
from jdllm.planning.budget import Budget
from jdllm.planning.layered import Layered, retention_of
from jdllm.serving.build import make_engine
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from tests.engines import generation_request

HOST, ROWS, LENGTH, PAGES = 1 << 30, 1024, 560, 3
DUAL = SamplingParams(gen_length=32, block_length=16, steps=8, cache="dual", early_stop=False)


class Model(NamedTuple):
    """A model and its weights in f32."""

    config: ModelConfig
    params: Params


def layered_of(model: Model, kept: int, *, host: int = HOST, sampling: SamplingParams = DUAL) -> Layered:
    """The room in which `kept` layers of `ROWS` rows stay on the device while they are refreshed."""
    weights, steps = tree_bytes(model.params), 64 << 20
    retention = retention_of(sampling)
    unlimited = Layered(model.config, "float32", Budget(0, 0, host), weights, steps, retention)
    device = unlimited.reading(ROWS, 512, 0) + kept * unlimited.keys_bytes(unlimited.stored_rows(ROWS))
    return unlimited._replace(budget=Budget(device, 0, host))


def engine_in(model: Model, room: Layered, executables: Executables) -> Engine:
    """An engine whose pool has few pages, all of the room but what steps of others need."""
    account = make_account(
        model.config, "float32", None, device=CPU, max_num_batched_tokens=256, weights_bytes=room.weights
    )
    pool = room.budget.device - room.weights - room.steps
    account = dataclasses.replace(account, budget=room.budget, pages=PAGES, page_bytes=-(-pool // PAGES))
    return make_engine(model.params, model.config, executables, account)


def asked(config: ModelConfig, length: int, sampling: SamplingParams = DUAL, seed: int = 0) -> Request:
    return generation_request(seed, np.random.default_rng(seed).integers(1, 100, length), sampling, config)
