"""Stores the block that a request has finished together with the next step."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jdllm.compiling.executables import Program
from jdllm.decoding.blocks import store_and_step
from jdllm.decoding.encoded_trace import encoding
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import Entry, Ladder, Sizes
from jdllm.serving.background import Background
from jdllm.serving.blocks.packing import (
    Form,
    PackedSteps,
    pack_blocks,
    pages_of,
    tiles_of,
    with_block_behind,
    with_steps,
)
from jdllm.serving.blocks.request import BlockRequest, block_spec
from jdllm.serving.demands import Demand, Kind
from jdllm.serving.denoise.cached_runner import LEVELS, step_level, step_static
from jdllm.serving.launch import Launch, Stored
from jdllm.serving.on_device import OnDevice
from jdllm.serving.part_runner import Need, Packed, PartRunner
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request, of_class

_store_and_step = encoding(store_and_step)


class StepRunner:
    """One evaluation stores finished blocks, and steps in the block behind each. Others step in it too.

    Arguments:
    - `model`: the model on its device, whose stored blocks foretell nothing.
    - `ladder`: the sizes of steps.
    - `background`: compiles sizes that fit better than those that serve now.
    """

    def __init__(self, model: OnDevice, ladder: Ladder, background: Background):
        self._params, self._config, self._executables, self._account, self._pool = model
        self._entries, self._tile_rows = ladder.reuse, ladder.tile_rows
        self._parts = PartRunner(model, background)
        self._sizes = {level: Sizes(self._entries) for level in LEVELS}

    def demand(self, request: BlockRequest) -> Demand:
        """What storing its finished blocks and the next step take."""
        tiles, entries = self._tiles_and_entries(request)
        return Demand(Kind.REUSE, tiles * self._tile_rows, len(request.candidates()), entries)

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack the block that each request fills, behind those that it has finished and that are not stored.
        Whatever `max_steps` is, there is one step."""
        asked, level = of_class(BlockRequest, requests), step_level(requests)
        needs = np.sum([self._tiles_and_entries(request) for request in asked], axis=0).tolist()
        head_rows = sum(len(request.candidates()) for request in asked)

        def packed(entry: Entry) -> Packed[PackedSteps]:
            batch = self._packed(asked, self._pool.book, entry, needs[1])
            return Packed(batch, self._program(batch, entry, level))

        need = Need(needs[0] * self._tile_rows, head_rows, len(asked))
        chosen = self._parts.choose(self._sizes[level], packed, need)

        def run() -> Any:
            return self._pool.run(chosen.executable, *chosen.arguments[:-1], writes=True)

        return Launch(
            run,
            chosen.batch.candidates,
            [Stored(request.forwarded, request.known) for request in asked],
            rows=chosen.entry.rows,
        )

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled."""
        sampling = SamplingParams(gen_length=2, block_length=1)
        request = BlockRequest(block_spec([0], sampling, self._config), -1)
        pool = self._pool.book.allocate(request.id, 2)
        for level in LEVELS:
            for entry in self._entries:
                yield self._program(self._packed([request], pool, entry, 1), entry, level)

    def warm(self) -> None:
        """Compile every entry of the ladder."""
        self._executables.prepare(list(self.programs()))
        for sizes in self._sizes.values():
            sizes.compiled.update(self._entries)

    def _tiles_and_entries(self, request: BlockRequest) -> tuple[int, int]:
        """Tiles that the rows of a request fill, and entries of the page table that these see."""
        tiles = tiles_of(with_block_behind(request, _stored(request)), self._tile_rows)
        return tiles, tiles * pages_of(request.computed)

    def _packed(self, asked: list[BlockRequest], pool: PageBook, entry: Entry, entries: int) -> PackedSteps:
        usual = self._pool.entries(entry.rows // self._tile_rows)
        form = Form(self._tile_rows, power_bucket(max(entries, 1), usual))
        parts = [_stored(request) for request in asked]
        packed = pack_blocks(asked, parts, self._config, pool, entry, form, steps=True)
        return with_steps(packed, asked, self._config, entry)

    def _program(self, batch: PackedSteps, entry: Entry, level: Level) -> Program:
        arguments = self._params, *batch.arguments, self._pool.abstract
        static = step_static(self._config, self._account, entry, level)
        name = f"storing of blocks and reuse of {entry.rows} rows"
        return Program(_store_and_step, arguments, static, donate=("pool",), name=name)


def steps_at_once(request: BlockRequest) -> bool:
    """Whether the blocks that a request has to store are few enough to be evaluated with the next step."""
    return not request.foretold and 0 < request.known - request.computed <= PAGE_ROWS


def _stored(request: BlockRequest) -> range:
    """The positions of its finished blocks that are not yet stored."""
    return range(request.computed, request.known)
