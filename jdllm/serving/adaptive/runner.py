"""Runs iterations of adaptive parallel decoding that evaluate whole sequences, both models together."""

from collections.abc import Iterator

import numpy as np

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executable, Program, temp_bytes
from jdllm.decoding.adaptive import AdaptiveBatch, denoise_adaptive
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.planning.ladder import Entry, Ladder, PatientSizes
from jdllm.serving.adaptive.packing import pack_adaptive
from jdllm.serving.adaptive.verifying import Verifying
from jdllm.serving.denoise.full_runner import FullRunner
from jdllm.serving.launch import Launch
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import demand
from jdllm.serving.request import Request

_denoise_adaptive = encoding(denoise_adaptive)


class AdaptiveRunner:
    """Runs iterations of one diffusion model with one verifier.

    Arguments:
    - `model`: the model on its device.
    - `ladder`: the sizes of its steps.
    - `full`: says how steps of the diffusion model are cut.
    - `verifying`: the verifier.
    """

    def __init__(self, model: OnDevice, ladder: Ladder, full: FullRunner, verifying: Verifying):
        self._params, self._config, self._executables, _, _ = model
        self._ladder = ladder
        self._full = full
        self._verifying, self._keys = verifying, verifying.keys
        self._sizes = PatientSizes(ladder.full)
        self._chosen: dict[tuple[Entry, int], ChunkConfig] = {}

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack one iteration; `max_steps` does not matter, and host memory is not used."""
        rows, head_rows = np.sum([demand(r) for r in requests], axis=0).tolist()
        asked, pool = self._verifying.hold(requests), self._keys.pool
        # A window with holes has more rows than masks: then an entry of more head rows serves, and each entry
        # has one executable.
        entry = self._sizes.choose(rows, max(head_rows, asked.rows), len(requests))
        models = self._config, self._verifying.config
        batch, candidates = pack_adaptive(requests, asked.windows, *models, pool.book, entry)
        step = self._compiled(batch, entry)
        self._keys.stored(requests, asked.spans)

        def run() -> EncodedTrace:
            self._full.make_room(entry)
            asked.read()
            return pool.run(step, self._params, self._verifying.params, batch, writes=True)

        return Launch(run, candidates, [None] * len(requests), rows=entry.rows)

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled, as far as plans tell before."""
        for entry, batch in self._empty():
            yield self._program(batch, self._full.planned_adaptive_chunks(entry), entry)

    def warm(self) -> None:
        """Compile every entry of the ladder."""
        for entry, batch in self._empty():
            self._compiled(batch, entry)

    def _program(self, batch: AdaptiveBatch, chunks: ChunkConfig, entry: Entry) -> Program:
        args = self._params, self._verifying.params, batch, self._keys.pool.abstract
        static = {"config": self._config, "verifier_config": self._verifying.config, "chunks": chunks}
        name = f"adaptive step of {entry.rows} rows"
        return Program(_denoise_adaptive, args, static, donate=("pool",), name=name)

    def _compiled(self, batch: AdaptiveBatch, entry: Entry) -> Executable:
        def compiled(chunks: ChunkConfig) -> Executable:
            return self._executables.get(self._program(batch, chunks, entry))

        def needs(chunks: ChunkConfig) -> int:
            return temp_bytes(compiled(chunks)) + self._keys.beyond_plan

        kind = entry, self._keys.pool.pages
        if kind not in self._chosen:
            self._chosen[kind] = self._full.adaptive_chunks(entry, needs)
            self._sizes.compiled.add(entry)
        return compiled(self._chosen[kind])

    def _empty(self) -> Iterator[tuple[Entry, AdaptiveBatch]]:
        """A batch that asks for little, of the sizes of each entry."""
        request, book = self._verifying.smallest()
        for entry in self._ladder.full:
            models = self._config, self._verifying.config
            yield entry, pack_adaptive([request], [range(1)], *models, book, entry).batch
