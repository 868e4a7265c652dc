"""Runs iterations of adaptive parallel decoding whose draft comes from cached keys and values."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jdllm.compiling.executables import Program
from jdllm.decoding.adaptive_cached import refresh_adaptive, reuse_adaptive
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.weights import Params
from jdllm.planning.ladder import Entry, Ladder, Sizes
from jdllm.serving.adaptive.packing import PackedAdaptive, pack_adaptive, with_verified
from jdllm.serving.adaptive.verifying import Verifying
from jdllm.serving.background import Background
from jdllm.serving.denoise.cached_packing import (
    StoringOf,
    lay_out_forwarded,
    reuse_demand,
    storing_of,
    tiles_of,
)
from jdllm.serving.denoise.cached_runner import table_entries
from jdllm.serving.launch import Launch
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import demand
from jdllm.serving.part_runner import Need, Packed, PartRunner
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request

_refresh, _reuse = encoding(refresh_adaptive), encoding(reuse_adaptive)


class _Held(NamedTuple):
    """What requests hold of both models.

    - `windows`: the rows of each request that the verifier evaluates.
    - `stored`: the pages of the diffusion model; `verified`: those of the verifier.
    """

    windows: list[range]
    stored: PageBook
    verified: PageBook


class CachedAdaptiveRunner:
    """Refreshes and reuses the keys and values of the diffusion model, with a verification in each step.

    Arguments:
    - `model`: the model on its device, whose pool has the keys and values that drafts are made from.
    - `ladder`: the sizes of its steps. Refreshes have those of full steps, some of which have as many head
      rows as rows: a window with holes, as in an infill, has more rows than masks.
    - `background`: compiles sizes that fit better than those that serve now.
    - `verifying`: the verifier.
    """

    def __init__(self, model: OnDevice, ladder: Ladder, background: Background, verifying: Verifying):
        self._params, self._config, self._executables, self._account, self._pool = model
        self._ladder = ladder
        self._parts = PartRunner(model, background)
        self._verifying, self._keys = verifying, verifying.keys
        self._refreshes, self._reuses = Sizes(ladder.full), Sizes(ladder.ranked)
        self._chained = model.on_each_card(chains)

    def refresh(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack one iteration of whole sequences, of which each policy's rows are stored."""
        rows, head_rows = np.sum([demand(r) for r in requests], axis=0).tolist()
        asked, verified = self._verifying.hold(requests), self._keys.pool
        held = _Held(asked.windows, self._pool.book, verified.book)
        packed = functools.partial(self._refresh_part, requests, held)
        need = Need(rows, max(head_rows, asked.rows), len(requests))
        chosen = self._parts.choose(self._refreshes, packed, need)
        self._keys.stored(requests, asked.spans)

        def run() -> EncodedTrace:
            asked.read()
            *arguments, _, _ = chosen.arguments
            pools = self._pool.device(), verified.device()
            (trace, verified.arrays), self._pool.arrays = chosen.executable(*arguments, *pools)
            return trace

        batch, storing = chosen.batch
        return Launch(run, batch.candidates, storing.stored, rows=chosen.entry.rows)

    def reuse(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack one iteration of the rows that each request forwards; `max_steps` does not matter."""
        rows, head_rows, needed = np.sum(
            [reuse_demand(r, PAGE_ROWS, self._ladder.tile_rows) for r in requests], axis=0
        ).tolist()
        asked, verified = self._verifying.hold(requests), self._keys.pool
        held = _Held(asked.windows, self._pool.book, verified.book)
        packed = functools.partial(self._reuse_part, requests, held, needed)
        need = Need(rows, max(head_rows, asked.rows), len(requests))
        chosen = self._parts.choose(self._reuses, packed, need)
        self._keys.stored(requests, asked.spans)

        def run() -> EncodedTrace:
            asked.read()
            *arguments, _, _ = chosen.arguments
            return verified.run(chosen.executable, *arguments, self._pool.device(), writes=True)

        return Launch(run, chosen.batch.candidates, [None] * len(requests), rows=chosen.entry.rows)

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled; nothing where requests cannot be cached."""
        if not self._account.max_refresh:
            return
        request, verified = self._verifying.smallest(cache="dual")
        held = _Held([range(1)], self._pool.book.allocate(request.id, len(request.tokens)), verified)
        for entry in self._ladder.full:
            yield self._refresh_part([request], held, entry).program
        for entry in self._ladder.ranked:
            yield self._reuse_part([request], held, 0, entry).program

    def warm(self) -> None:
        """Compile every entry of the ladder."""
        programs = list(self.programs())
        self._executables.prepare(programs)
        if programs:
            self._refreshes.compiled.update(self._ladder.full)
            self._reuses.compiled.update(self._ladder.ranked)

    def _refresh_part(
        self, requests: list[Request], held: _Held, entry: Entry
    ) -> Packed[tuple[PackedAdaptive, StoringOf]]:
        models = self._config, self._verifying.config
        packed = pack_adaptive(requests, held.windows, *models, held.verified, entry)
        storing = storing_of(requests, packed.batch.rows, held.stored, entry)
        args = *self._weights, packed.batch, storing.selection, storing.table, *self._pools
        static, name = self._static(entry), f"adaptive refresh of {entry.rows} rows"
        program = Program(_refresh, args, static, donate=("stored", "pool"), name=name)
        return Packed((packed, storing), program)

    def _reuse_part(
        self, requests: list[Request], held: _Held, needed: int, entry: Entry
    ) -> Packed[PackedAdaptive]:
        """A part whose tiles need so many entries of the page table."""
        tile_rows, pages = self._ladder.tile_rows, self._keys.pool.pages
        entries = table_entries(self._pool, entry.rows // tile_rows, needed)
        starts, table = tiles_of(requests, held.stored, entry, entries, tile_rows)
        laid_out, config = lay_out_forwarded(requests, entry, starts), self._verifying.config
        packed = with_verified(laid_out, requests, held.windows, config, held.verified, entry, pages)
        args = *self._weights, packed.batch, table, *self._pools
        static, name = self._static(entry), f"adaptive reuse of {entry.rows} rows"
        chained = self._chained(entry.rows)
        return Packed(packed, Program(_reuse, args, static, donate=("pool",), chained=chained, name=name))

    @property
    def _weights(self) -> tuple[Params, Params]:
        return self._params, self._verifying.params

    @property
    def _pools(self) -> tuple[Any, Any]:
        """The shapes of both pools, the verifier's last."""
        return self._pool.abstract, self._keys.pool.abstract

    def _static(self, entry: Entry) -> dict[str, Any]:
        return {
            "config": self._config,
            "verifier_config": self._verifying.config,
            "logits_chunks": -(-entry.head_rows // self._account.max_num_logits),
        }
