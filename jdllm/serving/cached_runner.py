"""Runs cached steps: owns the KV pool on the device and the account of its pages."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdllm.decoding.cached import refresh, reuse
from jdllm.decoding.caches import kept
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.decoding.executables import Executables
from jdllm.models.chain import chains
from jdllm.models.config import ModelConfig
from jdllm.models.pool import PAGE_ROWS, KeyValuePool, empty_pool, pool_bytes
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import power_bucket
from jdllm.planning.budget import MemoryBudgetError
from jdllm.serving.cached_packing import pack_refresh, pack_reuse
from jdllm.serving.kv_pool import KvPool
from jdllm.serving.request import Request

_SMALLEST_POOL = 16
_refresh, _reuse = encoding(refresh), encoding(reuse)


class Limit(NamedTuple):
    """What a cached step is held against before it runs.

    - `device`: bytes that the device may hold in all.
    - `fixed`: what is on it beside the pool and a step's temporaries.
    - `longest`: the longest context that fits without a cache, for the error.
    """

    device: int
    fixed: int
    longest: int


class CachedRunner:
    """Refreshes and reuses the keys and values of requests that cache.

    Arguments:
    - `params`, `config`, `executables`: as of `jdllm.serving.runner.StepRunner`.
    - `max_pages`: pages that the pool may have, scratch included; `None` for as many as are asked for.
    - `max_num_logits`: head rows whose logits may exist at a time.
    - `limit`: the memory budget; `None` for none.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        *,
        max_pages: int | None,
        max_num_logits: int,
        limit: Limit | None = None,
    ):
        self._params = params
        self._config = config
        self._executables = executables
        self._max_pages = max_pages
        self._max_num_logits = max_num_logits
        self._limit = limit
        self._pages = KvPool.empty(1, PAGE_ROWS)
        self._pool: KeyValuePool | None = None

    def make_room(self, requests: Sequence[Request]) -> None:
        """Let the pool hold all `requests` at once, or as much as it may; nobody may hold pages now."""
        pages = 1 + sum(map(self._pages_for, requests))
        if pages > self._pages.pages:
            pages = power_bucket(pages, _SMALLEST_POOL)
            self._pages = KvPool.empty(min(pages, self._max_pages or pages), PAGE_ROWS)
            self._pool = None

    def admit(self, request: Request) -> bool:
        """Give `request` the pages that it may ever need; `False` where others hold too many of them.

        Raises `KvPoolError` where the pool could not hold it alone.
        """
        if self._pages.owned and self._pages_for(request) > self._pages.free_pages:
            return False
        rows = kept(request.sampling, len(request.tokens))
        self._pages = self._pages.allocate(request.index, rows)
        return True

    def release(self, request: Request) -> None:
        """Free the pages of a finished request."""
        self._pages = self._pages.release(request.index)

    def refresh(self, requests: Sequence[Request], level: Level) -> tuple[EncodedTrace, list[np.ndarray]]:
        """One step of whole sequences; what each policy asks for is stored.

        Returns the trace, and for each request the positions of its head rows. Raises `MemoryBudgetError`
        where the step does not fit, before it has run.
        """
        (batch, candidates), selection, table, scoring = pack_refresh(requests, self._config, self._pages)
        trace, self._pool = self._run(
            _refresh,
            self._params,
            batch,
            selection,
            table,
            self._device_pool(),
            donate=(4,),
            scoring=scoring,
            **self._static(requests, len(batch.head.row), level),
        )
        return trace, candidates

    def reuse(
        self, requests: Sequence[Request], max_steps: int, level: Level
    ) -> tuple[EncodedTrace, list[np.ndarray]]:
        """Up to `max_steps` steps of what each request forwards; as `refresh` otherwise."""
        (batch, candidates), table = pack_reuse(requests, self._config, self._pages)
        trace = self._run(
            _reuse,
            self._params,
            batch,
            table,
            self._device_pool(),
            np.int32(min(max_steps, batch.segments.quota.shape[1])),
            chained=chains(self._params, self._config, len(batch.tokens)),
            **self._static(requests, len(batch.head.row), level),
        )
        return trace, candidates

    def _run(
        self,
        function: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        chained: bool = False,
        **static: Any,
    ) -> Any:
        executable = self._executables.compile(function, *args, donate=donate, chained=chained, **static)
        if self._limit is not None:
            pool = pool_bytes(self._config, str(self._dtype), self._pages.pages, PAGE_ROWS)
            needed = self._limit.fixed + pool + self._executables.temp_bytes(executable)
            if needed > self._limit.device:
                what = f"a cached step with a pool of {self._pages.pages} pages"
                longest = "context without a cache"
                raise MemoryBudgetError(what, needed, self._limit.device, self._limit.longest, longest)
        return executable(*args)

    def _static(self, requests: Sequence[Request], head_rows: int, level: Level) -> dict[str, Any]:
        return {
            "config": self._config,
            "mask_id": requests[0].mask_id,
            "logits_chunks": -(-head_rows // self._max_num_logits),
            "level": level,
        }

    def _device_pool(self) -> KeyValuePool:
        if self._pool is None:
            self._pool = empty_pool(self._config, self._pages.pages, PAGE_ROWS, self._dtype)
        return self._pool

    @property
    def _dtype(self) -> jnp.dtype:
        return self._params["final_norm"].dtype

    def _pages_for(self, request: Request) -> int:
        return self._pages.pages_for(kept(request.sampling, len(request.tokens)))
