"""Runs requests with a cache whose keys do not fit the KV pool: one at a time, layer by layer."""

import functools

import jax
import numpy as np

from jdllm.arrays import padded
from jdllm.compiling.executables import temp_bytes
from jdllm.decoding.cache_policies import Phase, kept, policy_of
from jdllm.decoding.encoded_trace import EncodedTrace
from jdllm.decoding.layered_cache import LayeredCache
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.execution.paged.selection import Selection
from jdllm.models.leaf import dtypes_of
from jdllm.planning.buckets import head_bucket
from jdllm.planning.budget import MemoryBudgetError
from jdllm.planning.ladder import Entry
from jdllm.planning.layered import CACHES, Layered, LayeredPlan, plan_layered, retention_of
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.denoise.cached_packing import pack_forwarded, storable_of
from jdllm.serving.denoise.cached_runner import step_level, step_static
from jdllm.serving.launch import Launch, Stored
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import pack
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec

_ROWS = 1 << 19
"""Rows times layers of one part: about a second of an 8B model on an H200, more of long sequences."""


class LayeredCacheRunner:
    """Runs requests whose keys take more than the KV pool, in the room of the pool and in host memory.

    Arguments:
    - `model`: the model on its device. Its KV pool is freed before anything of a request runs.
    """

    def __init__(self, model: OnDevice):
        self._params, self._config, self._executables, self._account, self._pool = model
        dtype = dtypes_of(model.params).activations.name
        self._model = Layered.of_account(model.config, dtype, self._account)
        self._plan = functools.lru_cache(maxsize=64)(functools.partial(_planned, self._model))
        self._running: dict[int, LayeredCache] = {}

    def takes(self, spec: RequestSpec) -> bool:
        """Whether a request needs more than the pool, and has room layer by layer."""
        if type(spec) is not RequestSpec or spec.adaptive or spec.sampling.cache not in CACHES:
            return False
        whole = spec.sampling.suffix_window is None
        return whole and not self._fits(spec) and self._planned(spec) is not None

    def life(self, spec: RequestSpec) -> Life:
        """What a request needs at most."""
        return Life(len(spec.tokens), 0, holds=True, alone=True)

    def demand(self, request: Request) -> Demand:
        """What the next step of a request takes."""
        rows = len(request.forwarded if request.phase is Phase.REUSE else request.tokens)
        return Demand(Kind.LAYERED, rows, len(request.candidates()), 0)

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack some layers of a refresh, or one step, of one request; `max_steps` does not matter."""
        (request,) = requests
        if request.id not in self._running:
            self._running[request.id] = self._begin(request)
        cache = self._running[request.id]
        return self._reuse(request, cache) if request.phase is Phase.REUSE else self._refresh(request, cache)

    @property
    def held(self) -> int:
        """For how many requests something is held."""
        return len(self._running)

    def forget(self, request: int) -> None:
        """Free what a request holds: it has ended, or begins again."""
        self._running.pop(request, None)

    def clear(self) -> None:
        """Nothing: what a request holds lies beside the pool, and no failed part of others damages it."""

    def _fits(self, spec: RequestSpec) -> bool:
        """Whether the pool holds a sequence, and its refreshes run beside the pool."""
        length = len(spec.tokens)
        stored = kept(spec.sampling, length)
        return length <= self._account.max_refresh and stored <= self._pool.pages * PAGE_ROWS

    def _planned(self, spec: RequestSpec) -> LayeredPlan | None:
        return self._plan(len(spec.tokens), retention_of(spec.sampling))

    def _refresh(self, request: Request, cache: LayeredCache) -> Launch:
        """Some layers; with the last ones the step."""
        plan, stores = self._planned(request.spec), request.phase is Phase.REFRESH
        assert plan is not None
        selection = _selection(request, plan.layering.rows)
        tokens = padded(request.tokens, plan.layering.rows)
        layers = max(1, _ROWS // len(request.tokens))
        some = functools.partial(self._some, cache, tokens, selection=selection, stores=stores)
        if cache.read + layers < self._config.num_layers:
            return Launch(lambda: some(layers), [np.zeros(0, np.int64)], [None], lambda _: 0)
        entry = Entry(plan.layering.rows, head_bucket(len(request.candidates())), 1, 1)
        packed = pack([request], self._config, entry)

        def end() -> EncodedTrace:
            some(self._config.num_layers)
            wanted = range(max(0, request.block.start - 1), request.block.stop)
            static = self._static(request, entry)
            return cache.refreshed(packed.batch, wanted, selection, stores=stores, **static)

        return Launch(end, packed.candidates, [_stored(request) if stores else None])

    def _reuse(self, request: Request, cache: LayeredCache) -> Launch:
        entry = Entry(len(request.forwarded), head_bucket(len(request.candidates())), 1, 1)
        packed, _ = pack_forwarded([request], self._config, entry, [0])
        start, static = int(request.forwarded[0]), self._static(request, entry)
        return Launch(lambda: cache.reused(packed.batch, start, **static), packed.candidates, [None])

    def _static(self, request: Request, entry: Entry):
        return step_static(self._config, self._account, entry, step_level([request]))

    def _some(
        self,
        cache: LayeredCache,
        tokens: np.ndarray,
        layers: int,
        *,
        selection: Selection | None,
        stores: bool,
    ) -> jax.Array:
        self._pool.free()
        return cache.some_layers(tokens, layers, selection, stores=stores)

    def _begin(self, request: Request) -> LayeredCache:
        length, plan = len(request.tokens), self._planned(request.spec)
        assert plan is not None
        assert self._model is not None
        cache = LayeredCache(self._params, self._config, plan.layering, length, self._executables.call)
        rows = request.block.stop - request.block.start
        compiled = cache.compile(self._executables.compile, rows, _selection(request, plan.layering.rows))
        needed = plan.prompt_bytes + max(0, max(map(temp_bytes, compiled)) - plan.temporaries)
        if needed > (device := self._model.budget.device):
            what = f"a request of {length} tokens, layer by layer,"
            raise MemoryBudgetError(
                what, needed, device, self._pool.pages * PAGE_ROWS, "request in the KV pool"
            )
        return cache


def _planned(model: Layered | None, length: int, retention: float | None) -> LayeredPlan | None:
    """How so many tokens run; `None` where they have no room, and where nothing is planned."""
    return None if model is None else plan_layered(model._replace(retention=retention), length, 0)


def _storable(request: Request) -> np.ndarray:
    """Which rows a refresh may store: all but those that the request forwards; bool."""
    policy = policy_of(request.sampling)
    assert policy is not None
    return storable_of(request, policy)


def _selection(request: Request, rows: int) -> Selection | None:
    """Which of so many rows each layer keeps; `None` where all are kept."""
    policy, sampling, block = policy_of(request.sampling), request.sampling, request.block
    if policy is None or not policy.scored:
        return None
    candidates = np.flatnonzero(_storable(request)).astype(np.int32)
    return Selection(
        block_first=_one(block.start),
        block_rows=_one(block.stop - block.start),
        row=padded(candidates, rows),
        segment=padded(np.zeros(len(candidates), np.int32), rows, 1),
        keep=_one(kept(sampling, len(candidates))),
        scored=np.ones(1, bool),
        per_head=np.full(1, policy.per_head),
        width=_one(sampling.effective("pool_kernel")),
    )


def _one(number: int) -> np.ndarray:
    return np.array([number], np.int32)


def _stored(request: Request) -> Stored:
    """What a refresh stores."""
    storable = _storable(request)
    return Stored(np.flatnonzero(~storable), kept(request.sampling, int(storable.sum())))
