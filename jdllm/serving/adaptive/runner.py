"""Runs iterations of adaptive parallel decoding: the diffusion model and its verifier in one executable."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdllm.arrays import padded
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executable, temp_bytes
from jdllm.decoding.adaptive import denoise_adaptive, read
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import Entry, Ladder, PatientSizes
from jdllm.serving.adaptive.packing import pack_adaptive, pack_verified, parts_of
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.adaptive.verifier_keys import VerifierKeys
from jdllm.serving.denoise.full_runner import FullRunner
from jdllm.serving.fitting import check_fits
from jdllm.serving.launch import Launch
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import demand
from jdllm.serving.request import Request

_denoise_adaptive = encoding(denoise_adaptive)
LEAST_READ, MOST_READ = 128, 1024
"""Rows of prompts that the verifier reads at a time."""


class AdaptiveRunner:
    """Runs iterations of one diffusion model with one verifier.

    Arguments:
    - `model`: the model on its device.
    - `ladder`: the sizes of its steps.
    - `full`: says how steps of the diffusion model are cut.
    - `verifier`: the autoregressive model.
    - `keys`: the keys and values that it has stored.
    """

    def __init__(
        self,
        model: OnDevice,
        ladder: Ladder,
        full: FullRunner,
        verifier: Verifier,
        keys: VerifierKeys,
    ):
        self._params, self._config, self._executables, self._account, _ = model
        self._full = full
        self._verifier = verifier
        self._keys = keys
        self._sizes = PatientSizes(ladder.full)
        self._chosen: dict[tuple[Entry, int, int], ChunkConfig] = {}

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack one iteration; `max_steps` does not matter, and host memory is not used."""
        rows, head_rows = np.sum([demand(r) for r in requests], axis=0).tolist()
        entry = self._sizes.choose(rows, head_rows, len(requests))
        spans = self._keys.hold(requests)
        reads = self._reads(requests, [span.unread for span in spans])
        windows, pool = [span.window for span in spans], self._keys.pool
        batch, candidates = pack_adaptive(
            requests, windows, self._config, self._verifier.config, pool.book, entry
        )
        arguments = self._params, self._verifier.params, batch
        step = self._compiled(arguments, entry)
        self._keys.stored(requests, spans)

        def run() -> EncodedTrace:
            self._full.make_room(entry)
            for call in reads:
                call()
            return pool.run(step, *arguments, writes=True)

        return Launch(run, candidates, [None] * len(requests), rows=entry.rows)

    def _reads(self, requests: Sequence[Request], unread: Sequence[range]) -> list[Callable[[], Any]]:
        """What the verifier has to read before it can see the windows of some requests."""
        verifier, pool = self._verifier, self._keys.pool
        calls = []
        for parts in parts_of(requests, unread, MOST_READ):
            size = power_bucket(sum(len(part.rows) for part in parts), LEAST_READ)
            tokens = np.concatenate([request.tokens[rows.start : rows.stop] for request, rows in parts])
            packed = pack_verified(parts, verifier.config, pool.book, size, pool.pages)
            arguments = verifier.params, padded(tokens.astype(np.int32), size), packed
            executable = self._executables.compile(
                read, *arguments, pool.abstract, donate=("pool",), config=verifier.config
            )
            check_fits(self._account, f"the verifier's reading of {size} rows", size, executable)
            calls.append(functools.partial(pool.run, executable, *arguments, writes=True))
        return calls

    def _compiled(self, arguments: tuple[Any, ...], entry: Entry) -> Executable:
        def compiled(chunks: ChunkConfig) -> Executable:
            return self._executables.compile(
                _denoise_adaptive,
                *arguments,
                self._keys.pool.abstract,
                donate=("pool",),
                config=self._config,
                verifier_config=self._verifier.config,
                chunks=chunks,
            )

        def needs(chunks: ChunkConfig) -> int:
            return temp_bytes(compiled(chunks)) + self._keys.beyond_plan

        kind = entry, len(arguments[2].verified_row), self._keys.pool.pages
        if kind not in self._chosen:
            self._chosen[kind] = self._full.adaptive_chunks(entry, needs)
            self._sizes.compiled.add(entry)
        return compiled(self._chosen[kind])
