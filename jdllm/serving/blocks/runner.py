"""Runs block models: finished blocks are stored, and the block behind them is denoised against these."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jdllm.compiling.executables import Program
from jdllm.decoding.blocks import store_blocks
from jdllm.decoding.causal import prefill
from jdllm.decoding.encoded_trace import Steps, encoding
from jdllm.decoding.encoded_trace import decode as decoded
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import CausalLadder, Entry, Ladder, Sizes, prefill_chunk
from jdllm.serving.ahead import told_by_table
from jdllm.serving.background import Background
from jdllm.serving.blocks.packing import (
    Form,
    PackedBlocks,
    PackedChoices,
    foretells,
    is_short,
    pack_blocks,
    pages_of,
    part_of,
    tiles_of,
    with_choices,
)
from jdllm.serving.blocks.request import BlockRequest, block_spec
from jdllm.serving.blocks.step_runner import StepRunner
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.denoise.cached_packing import reuse_demand
from jdllm.serving.denoise.cached_runner import CachedRunner
from jdllm.serving.launch import Launch, Stored
from jdllm.serving.next_tokens import by_request, spread
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import controlled
from jdllm.serving.part_runner import Need, Packed, PartRunner
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request, of_class
from jdllm.serving.spec import RequestSpec

_store = encoding(prefill)


class BlockRunner:
    """Stores and denoises blocks.

    Arguments:
    - `model`: the model on its device.
    - `ladder`: the sizes of steps that denoise, and of parts that store blocks behind stored rows; its
      refreshes are not used.
    - `stores`: the sizes of other parts that store, of `CausalLadder.prefill`.
    - `background`: compiles sizes that fit better than those that serve now.
    - `kind`: of the parts that store.
    - `at_once`: whether few blocks are stored together with the next step; no block foretells a token then.

    - `chunk`: tokens of a prompt that one part stores at most, whole pages.
    """

    def __init__(
        self,
        model: OnDevice,
        ladder: Ladder,
        stores: CausalLadder,
        background: Background,
        kind: Kind = Kind.PREFILL,
        at_once: bool = False,
    ):
        self._params, self._config, self._executables, account, self._pool = model
        self._entries = {False: stores.prefill, True: ladder.reuse}
        self._parts = PartRunner(model, background)
        kinds = [(False, False), (False, True), *([] if at_once else [(True, True)])]
        self._sizes = {
            (*kind, controls): Sizes(self._entries[kind[0]]) for kind in kinds for controls in (False, True)
        }
        self._usual = pages_of(account.rows) + PAGE_ROWS
        self._tile_rows = ladder.tile_rows
        without = dataclasses.replace(ladder, refresh=(), refresh_any=())
        self._steps = CachedRunner(model, without, background)
        self._kind = kind
        self._at_once = StepRunner(model, ladder, background, self._steps.left) if at_once else None
        self._foretells = self._config.logits_shift or self._config.causal_context
        self.chunk = prefill_chunk(account.rows)

    def life(self, spec: RequestSpec) -> Life:
        """What a request needs at most."""
        return Life(min(len(spec.tokens), self.chunk), pages_of(spec.stored_rows))

    def demand(self, request: Request) -> Demand:
        """What the next step of a request takes."""
        [asked] = of_class(BlockRequest, [request])
        if asked.denoises:
            rows, head_rows, entries = reuse_demand(asked, PAGE_ROWS, self._tile_rows)
            if self._at_once is not None:  # others of its part may store
                entries = max(entries, self._at_once.table_entries(asked))
            return Demand(Kind.REUSE, rows, head_rows, entries, asked.steps_left, told_by_table(asked))
        if self._at_once is not None and (together := self._at_once.demand(asked)) is not None:
            return together
        return self.store_demand(asked)

    def store_demand(self, asked: BlockRequest) -> Demand:
        """What storing the next finished blocks of a request takes."""
        part = part_of(asked, self.chunk)
        chosen, tiles = int(foretells(asked, part)), tiles_of(part, self._tile_rows)
        if self._at_once is None and is_short(part):
            return Demand(self._kind, tiles * self._tile_rows, chosen, tiles * pages_of(part.stop))
        return Demand(self._kind, len(part), chosen, pages_of(part.stop))

    def denoise(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack up to so many steps of the current block of each request; one where blocks are stored too."""
        if self._at_once is None or all(request.denoises for request in of_class(BlockRequest, requests)):
            return self._steps.reuse(requests, max_steps)
        return self._at_once.launch(requests, max_steps)

    def store(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack finished blocks of each request; `max_steps` does not matter."""
        asked = of_class(BlockRequest, requests)
        parts = [part_of(request, self.chunk) for request in asked]
        tiles, entries = [tiles_of(part, self._tile_rows) for part in parts], None
        filled = sum(tiles) * self._tile_rows
        tiled = self._at_once is None and all(map(is_short, parts))
        tiled = tiled and filled <= self._entries[True][-1].rows
        if tiled:
            entries = sum(each * pages_of(part.start) for each, part in zip(tiles, parts, strict=True))
        elif any(part.start > 0 for part in parts):
            entries = sum(pages_of(part.stop) for part in parts)
        rows = filled if tiled else sum(map(len, parts))

        def packed(entry: Entry) -> Packed[PackedBlocks | PackedChoices]:
            form = self._form(entry, tiled=tiled, entries=entries)
            batch = self._packed(asked, parts, self._pool.book, entry, form)
            return Packed(batch, self._program(batch, entry))

        # Where nothing is foretold the head is not asked, and there is one executable for all.
        sizes = self._sizes[tiled, entries is not None, self._foretells and controlled(requests)]
        chosen = self._parts.choose(sizes, packed, Need(rows, len(asked), len(asked)))
        counts = [int(foretells(*each)) for each in zip(asked, parts, strict=True)]

        def run() -> Any:
            return self._pool.run(chosen.executable, *chosen.arguments[:-1], writes=True)

        def take(found: Any) -> Steps | int:
            if not isinstance(chosen.batch, PackedChoices):
                return 1
            return spread(by_request(decoded(found), chosen.batch.order, len(asked)), counts)

        return Launch(
            run,
            [np.arange(r.known, r.known + count) for r, count in zip(asked, counts, strict=True)],
            [Stored(np.arange(0), part.stop) for part in parts],
            take,
            chosen.entry.rows,
        )

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled."""
        sampling = SamplingParams(gen_length=1, block_length=1)
        request = BlockRequest(block_spec([0], sampling, self._config), -1)
        pool = self._pool.book.allocate(request.id, 2)
        for tiled, stored in (kind[:2] for kind in self._sizes if not kind[2]):
            for entry in self._entries[tiled]:
                form = self._form(entry, tiled=tiled, entries=1 if stored else None)
                part = range(int(tiled), int(tiled) + 1)
                yield self._program(self._packed([request], [part], pool, entry, form), entry)
        yield from self._steps.programs()
        if self._at_once is not None:
            yield from self._at_once.programs()

    def warm(self) -> None:
        """Compile every entry of the ladder; entries with controls are compiled when first needed."""
        self._executables.prepare(list(self.programs()))
        for (tiled, _, controls), sizes in self._sizes.items():
            sizes.compiled.update(() if controls else self._entries[tiled])
        self._steps.warm()
        if self._at_once is not None:
            self._at_once.warm()

    def _form(self, entry: Entry, *, tiled: bool, entries: int | None) -> Form:
        """A form with room for so many entries of a table, which is rarely another one than others have."""
        tile_rows = self._tile_rows if tiled else None
        if entries is None:
            return Form(tile_rows, None)
        usual = self._pool.entries(entry.rows // self._tile_rows) if tiled else self._usual
        return Form(tile_rows, power_bucket(entries, usual))

    def _packed(
        self,
        asked: Sequence[BlockRequest],
        parts: Sequence[range],
        pool: PageBook,
        entry: Entry,
        form: Form,
    ) -> PackedBlocks | PackedChoices:
        packed = pack_blocks(asked, parts, self._config, pool, entry, form)
        if not self._foretells:
            return packed
        return with_choices(packed, asked, parts, self._config, entry)

    def _program(self, batch: PackedBlocks | PackedChoices, entry: Entry) -> Program:
        arguments = self._params, *batch.arguments, self._pool.abstract
        name, static = f"storing of {entry.rows} rows", {"config": self._config}
        if isinstance(batch, PackedBlocks):
            return Program(store_blocks, arguments, static, donate=("pool",), name=name)
        return Program(_store, arguments, static | {"level": Level.FILTERED}, donate=("pool",), name=name)
