"""Runs cached steps: refreshes that fill the KV pool, and reuses that read it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jdllm.decoding.cache_policies import Phase, policy_of
from jdllm.decoding.cached import refresh, reuse
from jdllm.decoding.encoded_trace import encoding
from jdllm.decoding.executables import Executable, Executables, Program
from jdllm.decoding.rules import head_level
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.account import Account
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import TILE_ROWS, Entry, Ladder, Sizes
from jdllm.serving.cached_packing import pack_refresh, pack_reuse, reuse_demand
from jdllm.serving.device_pool import DevicePool
from jdllm.serving.fitting import check_fits
from jdllm.serving.launch import Launch
from jdllm.serving.packing import demand, smallest_request
from jdllm.serving.request import Request
from jdllm.serving.spec import mask_id_of

_refresh, _reuse = encoding(refresh), encoding(reuse)
_POOL = (4,)
"""Where the pool is among the arguments of a refresh, which gives it back."""

_REUSE_LEVELS = (Level.TOP, Level.FILTERED)


class CachedRunner:
    """Refreshes and reuses the keys and values of requests that cache.

    Arguments:
    - `params`, `config`, `executables`, `ladder`, `account`: as of `jdllm.serving.full_runner.FullRunner`.

    - `pool`: where keys and values are stored.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        ladder: Ladder,
        account: Account,
        pool: DevicePool,
    ):
        self._params = params
        self._config = config
        self._executables = executables
        self._ladder = ladder
        self._account = account
        self._pool = pool
        self._refresh_sizes = {scored: Sizes(ladder.refresh) for scored in (False, True)}
        self._reuse_sizes = {level: Sizes(ladder.reuse) for level in _REUSE_LEVELS}
        self._chained = functools.cache(functools.partial(chains, params, config))

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled; nothing where requests cannot be cached."""
        if not self._account.max_refresh:
            return
        request, pages = smallest_request(self._config), self._pool.table.allocate(-1, 2)
        request.id = -1
        for entry in self._ladder.refresh:
            packed, selection, table, _ = pack_refresh([request], self._config, pages, entry)
            args = self._params, packed.batch, selection, table, self._pool.abstract
            static, name = self._refresh_static(entry, scored=True), f"refresh of {entry.rows} rows"
            yield Program(_refresh, args, static, donate=_POOL, name=name)
        for entry in self._ladder.reuse:
            entries = self._pool.entries(entry.rows // TILE_ROWS)
            packed, table = pack_reuse([request], self._config, pages, entry, entries)
            args = self._params, packed.batch, table, self._pool.abstract, np.int32(1)
            for level in self._reuse_sizes:
                static, name = self._static(entry, level), f"reuse of {entry.rows} rows"
                yield Program(_reuse, args, static, chained=self._chained(entry.rows), name=name)

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
        packed, selection, table, stored = pack_refresh(requests, self._config, self._pool.table, entry)
        static = self._refresh_static(entry, scored)
        arguments = self._params, packed.batch, selection, table
        executable = self._compiled(entry, _refresh, *arguments, self._pool.abstract, donate=_POOL, **static)
        sizes.compiled.add(entry)

        run = functools.partial(self._pool.run, executable, *arguments, writes=True)
        return Launch(run, packed.candidates, stored)

    def reuse(self, requests: list[Request], max_steps: int) -> Launch:
        """Up to `max_steps` steps of what each request forwards. As of `Launcher`."""
        rows, head_rows, needed = np.sum([reuse_demand(r, PAGE_ROWS) for r in requests], axis=0).tolist()
        level = _reuse_level(requests)
        sizes = self._reuse_sizes[level]
        entry = sizes.choose(rows, head_rows, len(requests), max_steps)
        usual = self._pool.entries(entry.rows // TILE_ROWS)
        entries = usual if needed <= usual else power_bucket(needed, usual)
        packed, table = pack_reuse(requests, self._config, self._pool.table, entry, entries)
        static = self._static(entry, level)
        arguments = self._params, packed.batch, table
        steps = np.int32(min(max_steps, entry.steps))
        chained = self._chained(entry.rows)
        executable = self._compiled(
            entry, _reuse, *arguments, self._pool.abstract, steps, chained=chained, **static
        )
        sizes.compiled.add(entry)
        return Launch(
            lambda: executable(*arguments, self._pool.device(), steps),
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


def _reuse_level(requests: list[Request]) -> Level:
    """One of the two levels that reuses are compiled for: usual ones end sooner at the lower."""
    usual = all(head_level(r.sampling) is Level.TOP for r in requests)
    return _REUSE_LEVELS[0] if usual else _REUSE_LEVELS[1]


def _scores(request: Request) -> bool:
    """Whether its refreshes keep the best of their candidates."""
    policy = policy_of(request.sampling)
    return policy is not None and policy.scored
