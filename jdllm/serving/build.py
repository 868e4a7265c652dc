"""An engine from its parts."""

from jdllm.chunks import ChunkConfig
from jdllm.decoding.executables import Executables
from jdllm.execution.offload.layer_stream import OffloadedWeights
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.account import Account
from jdllm.planning.ladder import MAX_SEGMENTS, make_ladder
from jdllm.planning.plan import LONGEST
from jdllm.serving.adaptive_runner import AdaptiveRunner
from jdllm.serving.cached_runner import CachedRunner
from jdllm.serving.diagnosis import Diagnosis
from jdllm.serving.engine import Engine
from jdllm.serving.full_runner import FullRunner
from jdllm.serving.launch import Launcher
from jdllm.serving.preparation import Preparation
from jdllm.serving.runner import Runner
from jdllm.serving.scheduler import Kind, Limits, Scheduler
from jdllm.serving.spec import RequestSpec
from jdllm.serving.stages import Model
from jdllm.serving.verifier import Verifier, check_verifiable


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
    ladder = make_ladder(account.rows)
    model = params, config, executables, ladder
    cached = CachedRunner(*model, account)
    full = FullRunner(
        *model,
        account,
        make_room=cached.free,
        chunks=chunks,
        max_num_logits=max_num_logits,
        offloaded=offloaded,
    )
    launchers: dict[Kind, Launcher] = {
        Kind.FULL: full.launch,
        Kind.REFRESH: cached.refresh,
        Kind.REUSE: cached.reuse,
    }
    preparation = Preparation(Model(params, config, executables, account, cached), account.prepare_rows)
    launchers[Kind.PREPARE] = preparation.launch
    if verifier is not None:
        launchers[Kind.ADAPTIVE] = AdaptiveRunner(*model, verifier, full.adaptive_chunks).launch
    limits = Limits(
        max_num_batched_tokens=account.rows,
        max_num_seqs=MAX_SEGMENTS,
        max_num_logits=ladder.head_rows,
        entries=cached.entries(ladder.tiles),
        reuse_rows=ladder.reuse[-1].rows,
        pages=cached.pages,
        longest=account.longest if chunks is None else LONGEST,
        longest_refresh=account.max_refresh,
        beside_pool=account.max_context,
    )

    def check(spec: RequestSpec) -> None:
        check_verifiable(spec, verifier)
        full.check(spec)

    if eager_pool:
        cached.make()
    return Engine(
        Runner(launchers),
        cached,
        Scheduler(limits),
        preparation,
        check=check,
        compiled=(full, cached),
        non_finite=Diagnosis(None if offloaded else params, config, executables, verifier),
    )
