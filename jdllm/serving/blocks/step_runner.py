"""Stores the block that a request has finished together with the next step."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jdllm.compiling.executables import Program
from jdllm.decoding.blocks import store_and_step
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.unseen import Unseen
from jdllm.execution.few_rows.chain import chains_storing
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.pallas.masked_logits import Level
from jdllm.planning.ladder import Entry, Ladder, Sizes, short_tile_rows
from jdllm.serving.ahead import told_by_table
from jdllm.serving.background import Background
from jdllm.serving.blocks.request import BlockRequest, block_spec
from jdllm.serving.blocks.step_packing import PackedSteps, needs_of, pack_steps
from jdllm.serving.demands import Demand, Kind
from jdllm.serving.denoise.cached_runner import LEVELS, step_level, step_static
from jdllm.serving.launch import Launch, Stored
from jdllm.serving.left_tokens import LeftTokens
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import controlled
from jdllm.serving.part_runner import Need, Packed, PartRunner
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request, of_class

_store_and_step = encoding(store_and_step)
_MOST_ROWS = 2 * PAGE_ROWS
"""Rows of a request that stores and steps at once, in tiles: where the prompt ends, many short blocks may
have to be stored, which fill their tiles in part."""


class _TileRows:
    """How many rows the tiles of an evaluation have.

    A chain of kernels needs tiles of eight. Elsewhere tiles are as short as blocks are, so that no rows are
    computed that nobody wants.

    Arguments:
    - `ladder`: the sizes of steps.
    - `chained`: whether so many rows make a chain.
    - `short`: rows of a tile where there is none.

    - `usual`: rows of a tile of a chain.
    """

    def __init__(self, ladder: Ladder, chained: Callable[[int], bool], short: int):
        self.usual, self._short = ladder.tile_rows, short
        self._longest_chain = max((entry.rows for entry in ladder.reuse if chained(entry.rows)), default=0)

    def of(self, entry: Entry) -> int:
        return self.usual if entry.rows <= self._longest_chain else self._short

    def table_entries(self, request: BlockRequest) -> int:
        """Entries of the page table that a request needs at most, whatever tiles an evaluation has."""
        return max(needs_of(request, tile_rows)[1] for tile_rows in {self.usual, self._short})

    def rows_for(self, requests: Sequence[BlockRequest]) -> int:
        """How many rows an evaluation of these requests needs."""
        usual = _rows_in_tiles(requests, self.usual)
        if usual <= self._longest_chain or self._short == self.usual:
            return usual
        return max(_rows_in_tiles(requests, self._short), self._longest_chain + 1)


def _rows_in_tiles(requests: Sequence[BlockRequest], tile_rows: int) -> int:
    return tile_rows * sum(needs_of(request, tile_rows)[0] for request in requests)


class StepRunner:
    """One evaluation stores finished blocks, and steps in the block behind each. Others step in it too.

    Arguments:
    - `model`: the model on its device, whose stored blocks foretell nothing.
    - `ladder`: the sizes of steps.
    - `background`: compiles sizes that fit better than those that serve now.
    - `left`: the tokens that parts leave.
    """

    def __init__(self, model: OnDevice, ladder: Ladder, background: Background, left: LeftTokens):
        self._params, self._config, self._executables, self._account, self._pool = model
        self._entries = ladder.reuse
        self._parts, self._left = PartRunner(model, background), left
        self._sizes: dict[tuple[Level, bool], Sizes] = {
            kind: Sizes(self._entries) for kind in itertools.product(LEVELS, (False, True))
        }
        self._chained = model.on_each_card(chains_storing)
        assert self._config.block_length is not None  # a block model has one
        self._table_size = self._pool.entries(ladder.tiles)  # holds what the scheduler gives to a part
        short = short_tile_rows(self._config.block_length, ladder.tile_rows)
        self._tiles = _TileRows(ladder, self._chained, short)

    def demand(self, request: BlockRequest) -> Demand | None:
        """What storing its finished blocks and the next step take; `None` where no block is to be stored, or
        too many are."""
        if request.foretold or request.denoises:
            return None
        rows, entries = _rows_in_tiles([request], self._tiles.usual), self.table_entries(request)
        if rows > min(_MOST_ROWS, self._entries[-1].rows) or entries > self._table_size:
            return None
        return Demand(Kind.REUSE, rows, len(request.candidates()), entries, stores=True)

    def table_entries(self, request: BlockRequest) -> int:
        """Entries of the page table that a request needs at most in a part in which some store."""
        return self._tiles.table_entries(request)

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack the block that each request fills, behind those that it has finished and that are not stored.
        Whatever `max_steps` is, there is one step."""
        asked, level = of_class(BlockRequest, requests), step_level(requests)
        candidates = [request.candidates() for request in asked]

        def packed(entry: Entry) -> Packed[PackedSteps]:
            batch = self._packed(asked, candidates, self._pool.book, entry)
            return Packed(batch, self._program(batch, entry, level))

        need = Need(self._tiles.rows_for(asked), sum(map(len, candidates)), len(asked))
        chosen = self._parts.choose(self._sizes[level, controlled(requests)], packed, need)

        def run() -> EncodedTrace:
            arguments, unseen = chosen.arguments[:-2], self._left.unseen(chosen.batch.source)
            trace, tokens = self._pool.run(chosen.executable, *arguments, unseen, writes=True)
            self._left.keep(Kind.REUSE, tokens)
            return trace

        return Launch(
            run,
            candidates,
            [Stored(request.forwarded, request.known) for request in asked],
            rows=chosen.entry.rows,
            left_at=self._left.begins(Kind.REUSE, candidates) if all(map(told_by_table, asked)) else None,
        )

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled."""
        sampling = SamplingParams(gen_length=2, block_length=1)
        request = BlockRequest(block_spec([0], sampling, self._config), -1)
        request.find(request.known)  # one block, which fills a tile at most
        pool = self._pool.book.allocate(request.id, 2)
        for level in LEVELS:
            for entry in self._entries:
                yield self._program(
                    self._packed([request], [request.candidates()], pool, entry), entry, level
                )

    def warm(self) -> None:
        """Compile every entry of the ladder; entries with controls are compiled when first needed."""
        self._executables.prepare(list(self.programs()))
        for level in LEVELS:
            self._sizes[level, False].compiled.update(self._entries)

    def _packed(
        self,
        asked: list[BlockRequest],
        candidates: list[np.ndarray],
        pool: PageBook,
        entry: Entry,
    ) -> PackedSteps:
        return pack_steps(
            asked, candidates, self._config, pool, entry, self._table_size, self._tiles.of(entry)
        )

    def _program(self, batch: PackedSteps, entry: Entry, level: Level) -> Program:
        unseen = Unseen(self._left.nothing, self._left.nothing, batch.source)
        arguments = self._params, *batch.arguments, unseen, self._pool.abstract
        static = step_static(self._config, self._account, entry, level)
        name = f"storing of blocks and reuse of {entry.rows} rows"
        chained = self._chained(entry.rows)
        return Program(_store_and_step, arguments, static, donate=("pool",), chained=chained, name=name)
