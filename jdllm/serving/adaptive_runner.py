"""Runs iterations of adaptive parallel decoding: the diffusion model and its verifier in one executable."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jdllm.chunks import ChunkConfig
from jdllm.decoding.adaptive import AdaptiveBatch, denoise_adaptive
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.decoding.executables import Executable, Executables
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.ladder import Entry, Ladder, Sizes
from jdllm.serving.adaptive_packing import pack_adaptive
from jdllm.serving.launch import Launch
from jdllm.serving.packing import demand
from jdllm.serving.request import Request
from jdllm.serving.verifier import Verifier

_denoise_adaptive = encoding(denoise_adaptive)

Compile = Callable[[ChunkConfig], Executable]
"""The executable that runs with given chunk counts, for its memory."""


class AdaptiveRunner:
    """Runs iterations of one diffusion model with one verifier.

    Arguments:
    - `params`, `config`, `executables`, `ladder`: as of `jdllm.serving.full_runner.FullRunner`.
    - `verifier`: the autoregressive model.
    - `choose`: chooses the chunk counts of an entry; raises `MemoryBudgetError` where none fit.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        ladder: Ladder,
        verifier: Verifier,
        choose: Callable[[Entry, Compile], ChunkConfig],
    ):
        self._params = params
        self._config = config
        self._executables = executables
        self._verifier = verifier
        self._choose = choose
        self._sizes = Sizes(ladder.full)
        self._chosen: dict[Entry, ChunkConfig] = {}

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """One iteration, as of `Launcher`; host memory is not used."""
        rows, head_rows = np.sum([demand(r) for r in requests], axis=0).tolist()
        entry = self._sizes.choose(rows, head_rows, len(requests))
        batch, candidates = pack_adaptive(requests, self._config, self._verifier.config, entry)
        static = self._static(self._chunks(batch, entry))

        def run() -> EncodedTrace:
            return self._executables.call(_denoise_adaptive, *self._arguments(batch), **static)

        return Launch(run, candidates, [None] * len(requests))

    def _chunks(self, batch: AdaptiveBatch, entry: Entry) -> ChunkConfig:
        def compiled(chunks: ChunkConfig) -> Executable:
            return self._executables.compile(
                _denoise_adaptive, *self._arguments(batch), **self._static(chunks)
            )

        if entry not in self._chosen:
            self._chosen[entry] = self._choose(entry, compiled)
            self._sizes.compiled.add(entry)
        return self._chosen[entry]

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
