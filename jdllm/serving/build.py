"""An engine from its parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.errors import ConfigError, DoesNotFitError
from jdllm.execution.offload.layer_stream import OffloadedWeights
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.account import Account
from jdllm.planning.ladder import MAX_SEGMENTS, TILE_ROWS, Entry, Ladder, make_causal_ladder, make_ladder
from jdllm.planning.plan import LONGEST
from jdllm.serving.adaptive.runner import AdaptiveRunner
from jdllm.serving.adaptive.verifier import Verifier, check_verifiable
from jdllm.serving.adaptive.verifier_keys import VerifierKeys
from jdllm.serving.background import Background
from jdllm.serving.causal.layered_runner import LayeredRunner
from jdllm.serving.causal.runner import CausalRunner
from jdllm.serving.costs import Costs, DenoisingCosts
from jdllm.serving.denoise.cached_runner import CachedRunner
from jdllm.serving.denoise.full_runner import FullRunner
from jdllm.serving.diagnosis import Diagnosis
from jdllm.serving.engine import Engine
from jdllm.serving.launch import Compiled, Launcher
from jdllm.serving.long.preparation import Preparation
from jdllm.serving.long.stages import Model
from jdllm.serving.pool.device_pool import DevicePool
from jdllm.serving.runner import Runner
from jdllm.serving.scheduler import Kind, Limits, Scheduler
from jdllm.serving.spec import RequestSpec


def make_engine(
    params: Params,
    config: ModelConfig,
    executables: Executables,
    account: Account,
    *,
    chunks: ChunkConfig | None = None,
    max_num_logits: int | None = None,
    verifier: Verifier | None = None,
    eager_pool: bool = False,
    offloaded: OffloadedWeights | None = None,
) -> Engine:
    """An engine for one model on one device.

    Arguments:
    - `params`, `config`: the model, with its weights on the device.
    - `executables`: where compiled steps are kept.
    - `account`: the memory of the device, and thus the largest step and the KV pool.
    - `chunks`, `max_num_logits`, `offloaded`: as of `FullRunner`.
    - `verifier`: for adaptive parallel decoding.
    - `eager_pool`: put the KV pool on the device now, not with the first request that needs it.
    """
    keys, background = None, Background()
    pool = DevicePool(config, params["final_norm"].dtype, account.pages)
    model = params, config, executables
    preparation = Preparation(Model(*model, account, pool), account.prepare_rows)
    if config.attention == "causal":
        _check_causal(account, chunks)
        parts = _causal(*model, account, pool, background)
    else:
        ladder = make_ladder(account.rows)
        full = FullRunner(
            *model,
            ladder,
            account,
            background=background,
            make_room=pool.free,
            chunks=chunks,
            max_num_logits=max_num_logits,
            offloaded=offloaded,
        )
        cached = CachedRunner(*model, ladder, account, pool, background)
        parts = _denoising(full, cached, preparation, ladder, account)
        if verifier is not None:
            keys = VerifierKeys(verifier, account.rows)
            adaptive = AdaptiveRunner(*model, ladder, account, full, verifier, keys)
            parts.launchers[Kind.ADAPTIVE] = adaptive.launch
    limits = Limits(
        max_num_batched_tokens=account.rows,
        max_num_seqs=MAX_SEGMENTS,
        max_num_logits=parts.head_rows,
        entries=pool.entries(parts.tiles),
        reuse_rows=TILE_ROWS * parts.tiles,
        pages=pool.pages,
        longest=parts.longest if chunks is None else LONGEST,
        longest_refresh=account.max_refresh,
        beside_pool=parts.beside_pool,
        uncached_rows=parts.uncached_rows,
        sizes={kind: [entry.rows for entry in entries] for kind, entries in parts.filled.items()},
    )

    def check(spec: RequestSpec) -> None:
        check_verifiable(spec, verifier)
        parts.check(spec)
        life = parts.costs.life(spec)
        if life.pages:
            account.check_room(life.rows, life.pages)

    if eager_pool:
        pool.make()
    return Engine(
        Runner(parts.launchers),
        pool,
        Scheduler(limits),
        preparation,
        parts.costs,
        check=check,
        compiled=parts.compiled,
        background=background,
        non_finite=Diagnosis(None if offloaded else params, config, executables, verifier),
        layered=parts.layered,
        verifier_keys=keys,
    )


class _Parts(NamedTuple):
    """What an engine is made of by the kind of its model.

    - `launchers`: for each kind of part what packs it.
    - `costs`, `check`, `compiled`: as of `Engine`.
    - `head_rows`: that requests share in one part.
    - `tiles`: of the largest step that reads the pool.
    - `filled`: the sizes of kinds whose requests are worth waiting for.
    - `longest`, `beside_pool`, `uncached_rows`: as of `Limits`.
    - `layered`: as of `Engine`.
    """

    launchers: dict[Kind, Launcher]
    costs: Costs
    check: Callable[[RequestSpec], None]
    compiled: tuple[Compiled, ...]
    head_rows: int
    tiles: int
    filled: Mapping[Kind, Sequence[Entry]]
    longest: int
    beside_pool: int
    uncached_rows: int
    layered: LayeredRunner | None = None


def _denoising(
    full: FullRunner, cached: CachedRunner, preparation: Preparation, ladder: Ladder, account: Account
) -> _Parts:
    launchers: dict[Kind, Launcher] = {
        Kind.FULL: full.launch,
        Kind.REFRESH: cached.refresh,
        Kind.REUSE: cached.reuse,
        Kind.PREPARE: preparation.launch,
    }
    costs = DenoisingCosts(preparation, account.rows)
    filled = {Kind.REFRESH: ladder.refresh}
    return _Parts(
        launchers,
        costs,
        full.check,
        (full, cached),
        ladder.head_rows,
        ladder.tiles,
        filled,
        account.longest,
        account.max_context,
        min(account.rows, ladder.full[-1].rows),
    )


def _causal(
    params: Params,
    config: ModelConfig,
    executables: Executables,
    account: Account,
    pool: DevicePool,
    background: Background,
) -> _Parts:
    ladder = make_causal_ladder(account.rows)
    layered = LayeredRunner(params, config, executables, account, pool.pages, pool.free)
    runner = CausalRunner(params, config, executables, ladder, account, pool, layered, background)
    launchers: dict[Kind, Launcher] = {
        Kind.PREFILL: runner.prefill,
        Kind.DECODE: runner.decode,
        Kind.LAYERED: layered.launch,
    }
    most = ladder.decode[-1].segments
    filled = {Kind.PREFILL: ladder.prefill}
    room = LONGEST, 0, account.rows
    return _Parts(launchers, runner, layered.check, (runner,), most, most, filled, *room, layered)


def _check_causal(account: Account, chunks: ChunkConfig | None) -> None:
    """Refuse what causal models do not have yet."""
    if chunks is not None:
        raise ConfigError("chunks are for models that denoise: leave them out for a causal model")
    if account.offloaded:
        raise DoesNotFitError(
            f"the memory leaves no room for {account.offloaded} layers of this causal model, whose weights"
            " have to be on the device: raise memory"
        )
