"""An engine from its parts."""

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.compiling.over_cards import over_processes
from jdllm.models.adapter import NO_DRAFTING, Drafting
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import dtypes_of
from jdllm.models.spread import pool_config, pool_sharding
from jdllm.models.weights import Params
from jdllm.planning.account import Account
from jdllm.planning.ladder import MAX_SEGMENTS
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.background import Background
from jdllm.serving.demands import COMPANY_ROWS, Limits
from jdllm.serving.diagnosis import Diagnosis
from jdllm.serving.engine import Engine
from jdllm.serving.mode import EngineParts, Extras
from jdllm.serving.modes.registry import mode_of
from jdllm.serving.on_device import OnDevice
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.runner import Runner
from jdllm.serving.scheduler import Scheduler


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
    company_rows: int = COMPANY_ROWS,
    drafting: Drafting = NO_DRAFTING,
) -> Engine:
    """An engine for one model on one device.

    Arguments:
    - `params`, `config`: the model, with its weights where the configuration has them.
    - `executables`: where compiled steps are kept.
    - `account`: the memory of the device, and thus the largest step and the KV pool.
    - `chunks`: fixed chunk counts of full steps instead of planned ones.
    - `max_num_logits`: head rows whose logits may exist at a time.
    - `verifier`: the model that checks the drafts of adaptive parallel decoding.
    - `eager_pool`: put the KV pool on the device now, not with the first request that needs the pool.
    - `company_rows`: of `Limits`.
    - `drafting`: how a model drafts that verifies its own drafts.

    Raises `ConfigError` and `DoesNotFitError` for what the model's way of generating cannot do.
    """
    in_step = over_processes(params)
    background = Background(in_step=in_step)
    pool = KvPool(pool_config(config), dtypes_of(params).pool, account.pages, pool_sharding(config))
    mode = mode_of(config)
    model = OnDevice(params, config, executables, account, pool)
    extras = Extras(chunks, max_num_logits, verifier, company_rows, drafting)
    parts = mode.parts(model, background, extras)
    if eager_pool:
        pool.make()
    return Engine(
        Runner(parts.launchers),
        pool,
        Scheduler(limits_of(parts, account, pool, company_rows, in_step=in_step)),
        account,
        mode,
        parts,
        background=background,
        non_finite=Diagnosis(None if config.offloaded else params, config, executables, verifier),
    )


def limits_of(
    parts: EngineParts,
    account: Account,
    pool: KvPool,
    company_rows: int = COMPANY_ROWS,
    *,
    in_step: bool = False,
) -> Limits:
    """What the scheduler may give to one part, and to all requests together."""
    return Limits(
        max_num_batched_tokens=account.rows,
        max_num_seqs=MAX_SEGMENTS,
        max_num_logits=parts.head_rows,
        entries=pool.entries(parts.tiles),
        reuse_rows=parts.reuse_rows,
        pages=pool.pages,
        longest=parts.longest,
        longest_refresh=account.max_refresh,
        beside_pool=parts.beside_pool,
        whole_rows=parts.whole_rows,
        sizes={kind: [entry.rows for entry in entries] for kind, entries in parts.filled.items()},
        company_rows=company_rows,
        in_step=in_step,
    )
