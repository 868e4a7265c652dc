"""Runs cached steps: owns the KV pool on the device and the account of its pages."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdllm.decoding.cache_policies import Phase, policy_of
from jdllm.decoding.cached import refresh, reuse
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.decoding.executables import Executable, Executables, Program
from jdllm.decoding.rules import head_level
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.paged.pool import PAGE_ROWS, KeyValuePool, empty_pool
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.split_attention import PageTable
from jdllm.planning.account import Account
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import TILE_ROWS, Entry, Ladder, Sizes
from jdllm.serving.cached_packing import pack_refresh, pack_reuse, reuse_demand
from jdllm.serving.fitting import check_fits
from jdllm.serving.kv_pool import KvPool, Live
from jdllm.serving.launch import Launch
from jdllm.serving.packing import demand, smallest_request
from jdllm.serving.request import Request
from jdllm.serving.spec import mask_id_of
from jdllm.serving.stored_chunks import StoredChunks

_refresh, _reuse = encoding(refresh), encoding(reuse)
_POOL = (4,)
"""Where the pool is among the arguments of a refresh, which gives it back."""

_REUSE_LEVELS = (Level.TOP, Level.FILTERED)


class CachedRunner:
    """Refreshes and reuses the keys and values of requests that cache.

    Arguments:
    - `params`, `config`, `executables`, `ladder`, `account`: as of `jdllm.serving.full_runner.FullRunner`.

    The pool has the account's pages from first to last. It is on the device from the first part that needs it
    until `free`, and made again in the same shape.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        ladder: Ladder,
        account: Account,
    ):
        self._params = params
        self._config = config
        self._executables = executables
        self._ladder = ladder
        self._account = account
        self._pages = KvPool.empty(account.pages, PAGE_ROWS)
        self.chunks = StoredChunks()
        self._pool: KeyValuePool | None = None
        self._refresh_sizes = {scored: Sizes(ladder.refresh) for scored in (False, True)}
        self._reuse_sizes = {level: Sizes(ladder.reuse) for level in _REUSE_LEVELS}
        self._abstract_pool = jax.eval_shape(self._empty_pool)
        self._chained = functools.cache(functools.partial(chains, params, config))

    @property
    def free_pages(self) -> int:
        """Pages that no request holds; chunks of contexts give theirs up. Any thread may ask."""
        pages = self._pages
        return pages.free_pages + self.chunks.pages(pages)

    @property
    def pages(self) -> int:
        """Pages that requests may hold in all."""
        return self._account.pages - 1

    @property
    def lost(self) -> bool:
        """Whether the pool was given to an executable that failed."""
        if self._pool is None:
            return False
        try:
            jax.block_until_ready(self._pool)
        except Exception:
            return True
        return self._pool.k.is_deleted() or self._pool.v.is_deleted()

    def entries(self, tiles: int) -> int:
        """Entries of the page table of so many tiles: requests of up to two tiles may fill the pool."""
        return 2 * self._account.pages + 4 * tiles

    def admit(self, request: Request) -> None:
        """Give `request` the pages that it may ever need; raises `KvPoolError` where they are not free."""
        rows = request.spec.stored_rows
        self._pages = self.chunks.make_room(self._pages, self._pages.pages_for(rows))
        self._pages = self._pages.allocate(request.id, rows)

    def release(self, request: Request) -> None:
        """Free the pages of a request."""
        self._pages = self._pages.release(request.id)

    def free(self) -> None:
        """Free the pool on the device: what it held is lost."""
        self.forget_chunks()
        self._pool = None

    def forget_chunks(self) -> None:
        """Give up the pages of all contents: after a failure they may not have been written."""
        self._pages = self.chunks.clear(self._pages)

    def make(self) -> None:
        """Put the pool on the device now."""
        self._device_pool()

    @property
    def abstract(self) -> Any:
        """The pool's shapes and types."""
        return self._abstract_pool

    def pages_of(self, owner: int) -> np.ndarray:
        """The pages of a request, or of a stored chunk, in the order of its rows."""
        return self._pages.pages_of(owner)

    def table_of(self, owner: int, live: Live) -> PageTable:
        """What a request or a stored chunk has stored, as attention reads it."""
        return self._pages.page_table([owner], [live], len(self.pages_of(owner)))

    def has_room(self, rows: Sequence[int]) -> bool:
        """Whether pages for contents of so many rows could be found beside those of requests."""
        return sum(map(self._pages.pages_for, rows)) <= self.free_pages

    def store_chunks(self, chunks: Mapping[bytes, int]) -> dict[bytes, np.ndarray]:
        """Take pages for contents that are not stored yet, and of so many rows; none where there is no room.

        Pages of contents that were used less recently are given up for them.
        """
        if not self.has_room(list(chunks.values())):
            return {}
        needed = sum(map(self._pages.pages_for, chunks.values()))
        self._pages = self.chunks.make_room(self._pages, needed)
        held = {}
        for key, rows in chunks.items():
            self._pages, chunk = self.chunks.add(self._pages, key, rows)
            held[key] = self._pages.pages_of(chunk.owner)
        return held

    def run(self, executable: Executable, *arguments: Any, writes: bool) -> Any:
        """Call an executable with the pool as its last argument, which it gives back where it writes it."""
        out, pool = executable(*arguments, self._device_pool())
        if writes:
            self._pool = pool
        return out

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled; nothing where requests cannot be cached."""
        if not self._account.max_refresh:
            return
        request, pages = smallest_request(self._config), self._pages.allocate(-1, 2)
        request.id = -1
        for entry in self._ladder.refresh:
            packed, selection, table, _ = pack_refresh([request], self._config, pages, entry)
            args = self._params, packed.batch, selection, table, self._abstract_pool
            yield Program(_refresh, args, self._refresh_static(entry, scored=True), donate=_POOL)
        for entry in self._ladder.reuse:
            entries = self.entries(entry.rows // TILE_ROWS)
            packed, table = pack_reuse([request], self._config, pages, entry, entries)
            args = self._params, packed.batch, table, self._abstract_pool, np.int32(1)
            for level in self._reuse_sizes:
                static = self._static(entry, level)
                yield Program(_reuse, args, static, chained=self._chained(entry.rows))

    def warm(self) -> None:
        """Compile every entry of the ladder. Refreshes that score keys serve those that do not: twice as many
        sizes save more padding than scoring costs."""
        self._executables.prepare(list(self.programs()))
        self._refresh_sizes[True].compiled.update(self._ladder.refresh)
        for sizes in self._reuse_sizes.values():
            sizes.compiled.update(self._ladder.reuse)

    def refresh(self, requests: list[Request], max_steps: int) -> Launch:
        """One step of whole sequences; what each policy asks for is stored. As of `Launcher`."""
        rows, head_rows = np.sum([demand(r) for r in requests], axis=0).tolist()
        scored = self._needs_scores(requests)
        sizes = self._refresh_sizes[scored]
        entry = sizes.choose(rows, head_rows, len(requests))
        packed, selection, table, stored = pack_refresh(requests, self._config, self._pages, entry)
        static = self._refresh_static(entry, scored)
        arguments = self._params, packed.batch, selection, table
        executable = self._compiled(entry, _refresh, *arguments, self._abstract_pool, donate=_POOL, **static)
        sizes.compiled.add(entry)

        def run() -> EncodedTrace:
            trace, self._pool = executable(*arguments, self._device_pool())
            return trace

        return Launch(run, packed.candidates, stored)

    def reuse(self, requests: list[Request], max_steps: int) -> Launch:
        """Up to `max_steps` steps of what each request forwards. As of `Launcher`."""
        rows, head_rows, needed = np.sum([reuse_demand(r, PAGE_ROWS) for r in requests], axis=0).tolist()
        level = _reuse_level(requests)
        sizes = self._reuse_sizes[level]
        entry = sizes.choose(rows, head_rows, len(requests), max_steps)
        usual = self.entries(entry.rows // TILE_ROWS)
        entries = usual if needed <= usual else power_bucket(needed, usual)
        packed, table = pack_reuse(requests, self._config, self._pages, entry, entries)
        static = self._static(entry, level)
        arguments = self._params, packed.batch, table
        steps = np.int32(min(max_steps, entry.steps))
        chained = self._chained(entry.rows)
        executable = self._compiled(
            entry, _reuse, *arguments, self._abstract_pool, steps, chained=chained, **static
        )
        sizes.compiled.add(entry)
        return Launch(
            lambda: executable(*arguments, self._device_pool(), steps),
            packed.candidates,
            [None] * len(requests),
        )

    def _needs_scores(self, requests: list[Request]) -> bool:
        """Whether the executable that scores keys serves a part. Where nobody stores now, as in a step before
        a refresh, the other one is quicker; it is not compiled for that alone, nor once all are compiled."""
        scoring = [request for request in requests if _scores(request)]
        now = any(request.phase is Phase.REFRESH for request in scoring)
        plain, scored = (sizes.compiled for sizes in self._refresh_sizes.values())
        return now or (not plain and (bool(scoring) or scored.issuperset(self._ladder.refresh)))

    def _compiled(self, entry: Entry, function: Callable[..., Any], *args: Any, **options: Any) -> Executable:
        executable = self._executables.compile(function, *args, **options)
        what = f"a cached step of {entry.rows} rows beside a pool of {self._account.pages} pages"
        check_fits(self._account, what, entry.rows, executable)
        return executable

    def _refresh_static(self, entry: Entry, scored: bool) -> dict[str, Any]:
        return self._static(entry, Level.FILTERED) | {"scored": scored}

    def _static(self, entry: Entry, level: Level) -> dict[str, Any]:
        return {
            "config": self._config,
            "mask_id": mask_id_of(self._config),
            "logits_chunks": -(-entry.head_rows // self._account.max_num_logits),
            "level": level,
        }

    def _device_pool(self) -> KeyValuePool:
        if self._pool is None:
            self._pool = self._empty_pool()
        return self._pool

    def _empty_pool(self) -> KeyValuePool:
        return empty_pool(self._config, self._account.pages, PAGE_ROWS, self._params["final_norm"].dtype)


def _reuse_level(requests: list[Request]) -> Level:
    """One of the two levels that reuses are compiled for: usual ones end sooner at the lower."""
    usual = all(head_level(r.sampling) is Level.TOP for r in requests)
    return _REUSE_LEVELS[0] if usual else _REUSE_LEVELS[1]


def _scores(request: Request) -> bool:
    """Whether its refreshes keep the best of their candidates."""
    policy = policy_of(request.sampling)
    return policy is not None and policy.scored
