"""Runs iterations of adaptive parallel decoding: the diffusion model and its verifier in one executable."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdllm.decoding.adaptive import AdaptiveBatch, denoise_adaptive
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.decoding.executables import Executable, Executables
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.chunks import ChunkConfig
from jdllm.planning.plan import Bucket
from jdllm.serving.adaptive_packing import pack_adaptive
from jdllm.serving.request import Request
from jdllm.serving.verifier import Verifier

_denoise_adaptive = encoding(denoise_adaptive)

Compile = Callable[[ChunkConfig], Executable]
"""The executable that runs with given chunk counts, for its memory."""


class AdaptiveRunner:
    """Runs iterations of one diffusion model with one verifier.

    Arguments:
    - `params`, `config`, `executables`: as of `jdllm.serving.runner.StepRunner`.
    - `verifier`: the autoregressive model.
    - `choose`: chooses the chunk counts of a bucket; raises `MemoryBudgetError` where none fit.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        verifier: Verifier,
        choose: Callable[[Bucket, Compile], ChunkConfig],
    ):
        self._params = params
        self._config = config
        self._executables = executables
        self._verifier = verifier
        self._choose = choose
        self._chosen: dict[Bucket, ChunkConfig] = {}

    def run(self, requests: Sequence[Request]) -> tuple[EncodedTrace, list[np.ndarray]]:
        """One iteration.

        Returns the trace, and for each request the positions of its window. Raises `MemoryBudgetError` where
        it does not fit the device, before anything has run; host memory is not used.
        """
        batch, candidates = pack_adaptive(requests, self._config, self._verifier.config)
        static = self._static(self._chunks(batch))
        trace = self._executables.call(_denoise_adaptive, *self._arguments(batch), **static)
        return trace, candidates

    def _chunks(self, batch: AdaptiveBatch) -> ChunkConfig:
        def compiled(chunks: ChunkConfig) -> Executable:
            return self._executables.compile(
                _denoise_adaptive, *self._arguments(batch), **self._static(chunks)
            )

        bucket = Bucket(len(batch.tokens), len(batch.tokens), len(batch.head.row))
        if bucket not in self._chosen:
            self._chosen[bucket] = self._choose(bucket, compiled)
        return self._chosen[bucket]

    def _arguments(self, batch: AdaptiveBatch) -> tuple[Params, Params, AdaptiveBatch]:
        return self._params, self._verifier.params, batch

    def _static(self, chunks: ChunkConfig) -> dict[str, Any]:
        heads = math.gcd(chunks.heads, self._verifier.config.num_kv_heads)
        return {
            "config": self._config,
            "verifier_config": self._verifier.config,
            "chunks": chunks,
            "verifier_chunks": dataclasses.replace(chunks, heads=heads),
        }
