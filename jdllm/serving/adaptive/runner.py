"""Runs iterations of adaptive parallel decoding: the diffusion model and its verifier in one executable."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jdllm.arrays import padded
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executable, Program, temp_bytes
from jdllm.decoding.adaptive import AdaptiveBatch, denoise_adaptive, read
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import Entry, Ladder, PatientSizes
from jdllm.serving.adaptive.packing import VerifiedRows, pack_adaptive, pack_verified, parts_of
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.adaptive.verifier_keys import VerifierKeys
from jdllm.serving.denoise.full_runner import FullRunner
from jdllm.serving.fitting import check_fits
from jdllm.serving.launch import Launch
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import demand, smallest_request
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request

_denoise_adaptive = encoding(denoise_adaptive)
READ_ROWS = (128, 256, 512, 1024)
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
        self._ladder = ladder
        self._full = full
        self._verifier = verifier
        self._keys = keys
        self._sizes = PatientSizes(ladder.full)
        self._chosen: dict[tuple[Entry, int], ChunkConfig] = {}

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack one iteration; `max_steps` does not matter, and host memory is not used."""
        rows, head_rows = np.sum([demand(r) for r in requests], axis=0).tolist()
        spans = self._keys.hold(requests)
        windows, pool = [span.window for span in spans], self._keys.pool
        # A window with holes has more rows than masks: then an entry of more head rows serves, and each entry
        # has one executable.
        entry = self._sizes.choose(rows, max(head_rows, sum(map(len, windows))), len(requests))
        reads = self._reads(requests, [span.unread for span in spans])
        batch, candidates = pack_adaptive(
            requests, windows, self._config, self._verifier.config, pool.book, entry
        )
        step = self._compiled(batch, entry)
        self._keys.stored(requests, spans)

        def run() -> EncodedTrace:
            self._full.make_room(entry)
            for call in reads:
                call()
            return pool.run(step, self._params, self._verifier.params, batch, writes=True)

        return Launch(run, candidates, [None] * len(requests), rows=entry.rows)

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled, as far as plans tell before."""
        yield from self._empty_reads().values()
        for entry, batch in self._empty():
            yield self._program(batch, self._full.planned_adaptive_chunks(entry), entry)

    def warm(self) -> None:
        """Compile every entry of the ladder, and the verifier's reading of prompts."""
        for rows, program in self._empty_reads().items():
            self._compiled_read(program, rows)
        for entry, batch in self._empty():
            self._compiled(batch, entry)

    def _reads(self, requests: Sequence[Request], unread: Sequence[range]) -> list[Callable[[], Any]]:
        """What the verifier has to read before it can see the windows of some requests."""
        pool, calls = self._keys.pool, []
        for parts in parts_of(requests, unread, READ_ROWS[-1]):
            rows = power_bucket(sum(len(part.rows) for part in parts), READ_ROWS[0])
            program = self._read_program(parts, rows, pool.book)
            executable = self._compiled_read(program, rows)
            calls.append(functools.partial(pool.run, executable, *program.args[:-1], writes=True))
        return calls

    def _read_program(self, parts: Sequence[VerifiedRows], rows: int, book: PageBook) -> Program:
        verifier, pool = self._verifier, self._keys.pool
        tokens = np.concatenate([request.tokens[read.start : read.stop] for request, read in parts])
        packed = pack_verified(parts, verifier.config, book, rows, pool.pages)
        args = verifier.params, padded(tokens.astype(np.int32), rows), packed, pool.abstract
        name = f"verifier's reading of {rows} rows"
        return Program(read, args, {"config": verifier.config}, donate=("pool",), name=name)

    def _compiled_read(self, program: Program, rows: int) -> Executable:
        executable = self._executables.get(program)
        check_fits(self._account, f"the {program.name}", rows, executable)
        return executable

    def _program(self, batch: AdaptiveBatch, chunks: ChunkConfig, entry: Entry) -> Program:
        args = self._params, self._verifier.params, batch, self._keys.pool.abstract
        static = {"config": self._config, "verifier_config": self._verifier.config, "chunks": chunks}
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
        request, book = self._smallest()
        for entry in self._ladder.full:
            models = self._config, self._verifier.config
            yield entry, pack_adaptive([request], [range(1)], *models, book, entry).batch

    def _empty_reads(self) -> dict[int, Program]:
        """Readings of a single row, by the rows that they are compiled for."""
        request, book = self._smallest()
        return {rows: self._read_program([VerifiedRows(request, range(1))], rows, book) for rows in READ_ROWS}

    def _smallest(self) -> tuple[Request, PageBook]:
        """A request that asks for little, and a book in which nobody else has pages."""
        request, held = smallest_request(self._config, transfer="adaptive"), self._keys.pool.book
        book = PageBook.empty(held.pages, held.page_rows)
        return request, book.allocate(request.id, len(request.tokens))
