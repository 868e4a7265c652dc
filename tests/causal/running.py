"""Causal requests run through an engine, and what they should give."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.serving.causal.request import causal_spec
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended

Oracle = Callable[[np.ndarray], np.ndarray]
"""Logits behind the last of some tokens, from an evaluation of all of them at once."""

Build = Callable[..., Engine]


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(2, 400, length).astype(np.int32)


def run(
    engine: Engine, asked: Sequence[tuple[np.ndarray, SamplingParams]], config: ModelConfig
) -> list[Request]:
    specs = [causal_spec(ids, sampling, config) for ids, sampling in asked]
    states: dict[int, Any] = {}
    for update in engine.run(specs):
        if isinstance(update, Ended):
            if update.error is not None:
                raise update.error
            states[update.request] = update.state
    return [states[i] for i in range(len(specs))]


def answers(requests: Sequence[Request]) -> list[list[int]]:
    return [request.tokens[request.returned].tolist() for request in requests]


def greedy(oracle: Oracle, ids: np.ndarray, count: int) -> list[int]:
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(oracle(np.array(tokens)).argmax()))
    return tokens[len(ids) :]


FREE = SamplingParams(max_tokens=9, early_stop=False)
