"""Runs cached steps: refreshes that fill the KV pool, and reuses that read it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jdllm.compiling.executables import Program
from jdllm.decoding.cache_policies import Phase, policy_of
from jdllm.decoding.cached import refresh, reuse
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.decoding.rules import head_level
from jdllm.decoding.unseen import Unseen
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.execution.paged.selection import USUAL_BLOCK, USUAL_WIDTH
from jdllm.models.config import ModelConfig
from jdllm.pallas.masked_logits import Level
from jdllm.planning.account import Account
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import Entry, Ladder, Sizes
from jdllm.planning.plan import Bucket
from jdllm.serving.ahead import told_by_table
from jdllm.serving.background import Background
from jdllm.serving.demands import Kind
from jdllm.serving.denoise.cached_packing import (
    RefreshBatch,
    ReuseBatch,
    pack_refresh,
    pack_reuse,
    reuse_demand,
)
from jdllm.serving.launch import Launch
from jdllm.serving.left_tokens import LeftTokens
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import controlled, demand, smallest_request
from jdllm.serving.part_runner import Need, Packed, PartRunner
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.request import Request
from jdllm.serving.spec import mask_id_of

_refresh, _reuse = encoding(refresh), encoding(reuse)
LEVELS = (Level.MOMENTS, Level.FILTERED)
"""Of the head, that steps are compiled for. Moments serve every order of rows, for 1 to 2 % of its time."""


class RefreshForm(NamedTuple):
    """What refreshes are compiled for.

    - `scored`: whether any request keeps its best candidates.
    - `usual`: whether no request needs a level of the head above the first of `LEVELS`, and those that score
      keys are usual, as in `jdllm.execution.paged.selection.sources`. Then the device counts no turns of a
      loop, which the host would wait for.
    - `controlled`: whether any request controls logits.
    """

    scored: bool
    usual: bool
    controlled: bool = False


class CachedRunner:
    """Refreshes and reuses the keys and values of requests that cache.

    Arguments:
    - `model`: the model on its device.
    - `ladder`: the sizes of its steps.
    - `background`: compiles sizes that fit better than those that serve now.

    `refresh_sizes` are those of each form of a refresh; `left` holds the tokens that parts leave.
    """

    def __init__(
        self,
        model: OnDevice,
        ladder: Ladder,
        background: Background,
    ):
        self._params, self._config, self._executables, self._account, self._pool = model
        self._ladder = ladder
        self._parts = PartRunner(model, background)
        self._refresh_entries = {True: ladder.refresh, False: ladder.refresh_any}
        self.refresh_sizes = {
            RefreshForm(scored, usual, controls): Sizes(self._refresh_entries[usual])
            for usual, controls in ((True, False), (False, False), (False, True))
            for scored in (False, True)
        }
        self._single_steps = Sizes(ladder.single)
        self._steps = {
            (LEVELS[0], False): Sizes(ladder.reuse),
            (LEVELS[1], False): Sizes(ladder.ranked),
            (LEVELS[1], True): Sizes(ladder.ranked),
        }
        self._warm = False
        most = max(entry.head_rows for entry in (*ladder.refresh, *ladder.single))
        self.left = LeftTokens(most, model.params)
        self._chained = model.on_each_card(chains)

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled; nothing where requests cannot be cached."""
        if not self._account.max_refresh:
            return
        request, pages = smallest_request(self._config), self._pool.book.allocate(-1, 2)
        request.id = -1
        for usual, entries in self._refresh_entries.items():
            for entry in entries:
                batch = pack_refresh([request], self._config, pages, entry)
                yield self._refresh_program(batch, entry, RefreshForm(scored=True, usual=usual))
        for entries, level, steps in (
            (self._ladder.reuse, LEVELS[0], 1),
            (self._ladder.single, LEVELS[0], None),
            (self._ladder.ranked, LEVELS[1], 1),
        ):
            for entry in entries:
                needed = self._table_entries(entry)
                batch = pack_reuse([request], self._config, pages, entry, needed, self._ladder.tile_rows)
                yield self._reuse_program(batch, entry, level, steps)

    def warm(self) -> None:
        """Compile every entry of the ladder; entries with controls are compiled when first needed. Refreshes
        that score keys serve those that do not: twice as many sizes save more padding than scoring costs."""
        self._executables.prepare(list(self.programs()))
        for usual, entries in self._refresh_entries.items():
            self.refresh_sizes[RefreshForm(scored=True, usual=usual)].compiled.update(entries)
        for sizes, entries in (
            (self._steps[LEVELS[0], False], self._ladder.reuse),
            (self._single_steps, self._ladder.single),
            (self._steps[LEVELS[1], False], self._ladder.ranked),
        ):
            sizes.compiled.update(entries)
        self._warm = True

    def refresh(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack one step of whole sequences; the rows that each policy asks for are stored."""
        rows, head_rows = np.sum([demand(r) for r in requests], axis=0).tolist()
        form = self._form(requests)
        sizes = self.refresh_sizes[form]

        def packed(entry: Entry) -> Packed[RefreshBatch]:
            batch = pack_refresh(requests, self._config, self._pool.book, entry)
            return Packed(batch, self._refresh_program(batch, entry, form))

        chosen = self._parts.choose(sizes, packed, Need(rows, head_rows, len(requests)))

        def run() -> EncodedTrace:
            arguments = chosen.arguments[:-1]
            trace, tokens = self._pool.run(chosen.executable, *arguments, writes=True)
            self.left.keep(Kind.REFRESH, tokens)
            return trace

        return Launch(
            run,
            chosen.batch.packed.candidates,
            chosen.batch.stored,
            rows=chosen.entry.rows,
            quick=form.usual,
            left_at=self.left.begins(Kind.REFRESH, chosen.batch.packed.candidates),
        )

    def reuse(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack up to `max_steps` steps of the rows that each request forwards."""
        rows, head_rows, needed = np.sum(
            [reuse_demand(r, PAGE_ROWS, self._ladder.tile_rows) for r in requests], axis=0
        ).tolist()
        level = step_level(requests)
        once = self._warm and max_steps == 1 and level is LEVELS[0]
        sizes = self._single_steps if once else self._steps[level, controlled(requests)]

        def packed(entry: Entry) -> Packed[ReuseBatch]:
            entries, tile_rows = self._table_entries(entry, needed), self._ladder.tile_rows
            batch = pack_reuse(requests, self._config, self._pool.book, entry, entries, tile_rows)
            steps = None if once else min(max_steps, entry.steps)
            return Packed(batch, self._reuse_program(batch, entry, level, steps))

        chosen = self._parts.choose(sizes, packed, Need(rows, head_rows, len(requests), max_steps))
        *arguments, _, _, steps = chosen.arguments

        def run() -> EncodedTrace:
            unseen = self.left.unseen(chosen.batch.source)
            trace, tokens = chosen.executable(*arguments, self._pool.device(), unseen, steps)
            self.left.keep(Kind.REUSE, tokens)
            return trace

        candidates = chosen.batch.packed.candidates
        leaves = max_steps == 1 and all(map(told_by_table, requests))
        return Launch(
            run,
            candidates,
            [None] * len(requests),
            rows=chosen.entry.rows,
            quick=once,
            left_at=self.left.begins(Kind.REUSE, candidates) if leaves else None,
        )

    def _form(self, requests: list[Request]) -> RefreshForm:
        """The form that serves a part.

        Where nobody stores now, as in a step before a refresh, the form that does not score keys is quicker;
        it is not compiled for that alone, nor once all sizes of the other one are compiled.
        """
        scoring = [request for request in requests if _scores(request)]
        usual, controls = all(map(is_usual, requests)), controlled(requests)
        now = any(request.phase is Phase.REFRESH for request in scoring)
        plain, scored = (self.refresh_sizes[RefreshForm(x, usual, controls)].compiled for x in (False, True))
        whole = scored.issuperset(self._refresh_entries[usual])
        return RefreshForm(now or (not plain and (bool(scoring) or whole)), usual, controls)

    def _refresh_program(self, batch: RefreshBatch, entry: Entry, form: RefreshForm) -> Program:
        args = self._params, batch.packed.batch, batch.selection, batch.table, self._pool.abstract
        level = LEVELS[not form.usual]
        static = step_static(self._config, self._account, entry, level)
        static |= {"scored": form.scored, "usual": form.usual, "left": self.left.size}
        static |= self._cut(entry, level)
        name, concurrent = f"refresh of {entry.rows} rows", self._concurrent(entry)
        return Program(_refresh, args, static, donate=("pool",), name=name, concurrent=concurrent)

    def _cut(self, entry: Entry, level: Level) -> dict[str, Any]:
        """The static arguments by which a refresh is cut that is longer than a whole step may be."""
        sharing, room = self._account.sharing, self._account.step_room(entry.rows)
        if sharing is None or room is None or entry.rows <= self._account.rows:
            return {}
        chunks = sharing.needs.refresh(Bucket(0, entry.rows, entry.head_rows), room, level).chunks
        return {"chunks": chunks, "logits_chunks": chunks.logits}

    def _reuse_program(self, batch: ReuseBatch, entry: Entry, level: Level, steps: int | None) -> Program:
        """A loop of so many steps; or one step without a loop, which does not keep the host waiting.

        Only a warm-up compiles both: a loop does one step too.
        """
        most = None if steps is None else np.int32(steps)
        unseen = Unseen(self.left.nothing, self.left.nothing, batch.source)
        args = self._params, batch.packed.batch, batch.table, self._pool.abstract, unseen, most
        static = step_static(self._config, self._account, entry, level)
        name, chained = f"reuse of {entry.rows} rows", self._chained(entry.rows)
        concurrent = not chained and self._concurrent(entry)
        return Program(_reuse, args, static, chained=chained, name=name, concurrent=concurrent)

    def _concurrent(self, entry: Entry) -> bool:
        """Whether kernels run side by side: temporaries take up to a third more than planned, for which there
        is room where twice the rows fit."""
        return 2 * entry.rows <= self._account.rows

    def _table_entries(self, entry: Entry, needed: int = 0) -> int:
        return table_entries(self._pool, entry.rows // self._ladder.tile_rows, needed)


def table_entries(pool: KvPool, tiles: int, needed: int = 0) -> int:
    """Entries of the page table of a reuse of so many tiles: the usual number, where that is enough."""
    usual = pool.entries(tiles)
    return usual if needed <= usual else power_bucket(needed, usual)


def step_static(config: ModelConfig, account: Account, entry: Entry, level: Level) -> dict[str, Any]:
    """The static arguments of every cached step."""
    return {
        "config": config,
        "mask_id": mask_id_of(config),
        "logits_chunks": -(-entry.head_rows // account.max_num_logits),
        "level": level,
    }


def is_usual(request: Request) -> bool:
    """Whether the usual form of a refresh serves a request: see `RefreshForm`."""
    return step_level([request]) is LEVELS[0] and (not _scores(request) or _scores_as_usual(request))


def step_level(requests: list[Request]) -> Level:
    """One of the two levels of the head that steps are compiled for: usual ones end sooner at the lower."""
    needed = max(head_level(request.sampling) for request in requests)
    return LEVELS[needed > LEVELS[0]]


def _scores(request: Request) -> bool:
    """Whether its refreshes keep the best of their candidates."""
    policy = policy_of(request.sampling)
    return policy is not None and policy.scored


def _scores_as_usual(request: Request) -> bool:
    block, width = request.block, request.sampling.effective("pool_kernel")
    return block.stop - block.start <= USUAL_BLOCK and width <= USUAL_WIDTH
