"""`plan_memory`: what a step needs on the device, how it is cut to fit, and the longest context that fits."""

import bisect
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jdllm.chunks import TILE, ChunkConfig
from jdllm.decoding.cache_policies import kept
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import Cache, SamplingParams
from jdllm.errors import ConfigError
from jdllm.execution.offload.tiers import HostTiers, host_buffers
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.models.config import ModelConfig
from jdllm.models.weights import param_bytes
from jdllm.pallas.device import HOPPER, Target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import head_bucket, row_bucket, steps_per_dispatch
from jdllm.planning.budget import Budget, MemoryBudgetError, StepRoom
from jdllm.planning.graph import GraphTemplate
from jdllm.planning.planner import ActivationPlan
from jdllm.planning.search import largest, search
from jdllm.planning.templates import StepKind, listed_bytes, step_template
from jdllm.planning.tier_template import tier_template

UNLIMITED = StepRoom(1 << 62)
"""Room for any step."""

_MOST_CHUNKS = 512
_LOOK_BACK = 8
_TIER_ROWS = (16384, 4096, 1024)
LONGEST = 1 << 24
"""The longest context in tokens: positions are exact in f32 below this."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The model, the device and the requests of a plan.

    - `config`, `dtype`: the model, and the type of its weights and activations.
    - `device`: the device of the model.
    - `mask_ratio`: masked rows per row.
    - `level`: what the head computes for a row.
    - `cache_policy`, `retention`: the cache of requests and the share of rows that it keeps, which decide the
      size of the KV pool. With a cache, layers run on the device, and all heads at once.
    - `max_num_logits`: head rows whose logits may exist at a time; `None` for as many as fit.
    """

    config: ModelConfig
    dtype: str = "bfloat16"
    device: Target = HOPPER
    mask_ratio: float = 0.5
    level: Level = Level.TOP
    cache_policy: Cache = "none"
    retention: float | None = None
    max_num_logits: int | None = None

    def __post_init__(self):
        if not 0 < self.mask_ratio <= 1:
            raise ConfigError(f"mask ratio {self.mask_ratio:g}: expected a number above 0, at most 1")
        if self.cache_policy not in cache_names():
            known = ", ".join(cache_names())
            raise ConfigError(f"unknown cache policy {self.cache_policy!r}: expected one of {known}")
        _ = self.sampling  # refuses what a generation would refuse

    @property
    def sampling(self) -> SamplingParams:
        """Parameters of its requests."""
        return SamplingParams(cache=self.cache_policy, retention=self.retention)

    @property
    def caches(self) -> bool:
        return self.cache_policy != "none"

    @property
    def kind(self) -> StepKind:
        return StepKind(jnp.dtype(self.dtype).itemsize, self.device, self.level)

    def stored_rows(self, context: int) -> int:
        """Rows of the KV pool that the cache policy keeps of so many tokens at most."""
        return kept(self.sampling, context)

    def kv_pool_bytes(self, context: int) -> int:
        """Bytes of the keys and values of all layers that the cache policy keeps of so many tokens, in whole
        pages; 0 for no tokens, of which nothing is kept."""
        if not (self.caches and context):
            return 0
        pages = 1 + -(-self.stored_rows(context) // PAGE_ROWS)  # one is scratch
        return pool_bytes(self.config, self.dtype, pages, PAGE_ROWS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The memory of one step, whatever else is on the device.

    - `context`, `rows`, `head_rows`: tokens, and the compiled sizes that hold them.
    - `room`: what the step may use.
    - `kv_pool_bytes`, `batch_bytes`: bytes that no chunk count changes; the batch counts its inputs and the
      trace that comes back.
    - `activation`: the plan of everything else.
    - `chunks`: the chunk counts to run with; with `tiers` only the count of the logits matters.
    - `tiers`: arrays in host memory beside weights, or `None`; `host_bytes` of host memory in all.
    - `seconds`: how long planning took.
    """

    context: int
    rows: int
    head_rows: int
    room: StepRoom
    kv_pool_bytes: int
    batch_bytes: int
    activation: ActivationPlan
    chunks: ChunkConfig
    tiers: HostTiers | None
    host_bytes: int
    seconds: float

    @property
    def bucket(self) -> "Bucket":
        return Bucket(self.context, self.rows, self.head_rows)

    @property
    def step_bytes(self) -> int:
        """Bytes of the device that the step needs."""
        return self.kv_pool_bytes + self.batch_bytes + self.activation.peak_bytes

    @property
    def fits(self) -> bool:
        return self.step_bytes <= self.room.device and self.host_bytes <= self.room.host


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan(StepPlan):
    """The memory of a device during one step.

    - `budget`: what may be used.
    - `weights_bytes`: of the device.
    - `streamed_bytes`: of weights that each step copies out of host memory.
    """

    budget: Budget
    weights_bytes: int
    streamed_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Device bytes that no chunk count changes."""
        return self.budget.overhead + self.weights_bytes + self.kv_pool_bytes + self.batch_bytes

    @property
    def peak_bytes(self) -> int:
        """The whole device need, overhead included."""
        return self.fixed_bytes + self.activation.peak_bytes

    @property
    def host_tiers(self) -> list[str]:
        """Names of the arrays in host memory."""
        weights = ["weights"] if self.streamed_bytes else []
        if self.tiers is None:
            return weights
        return ["residual", *(["kv"] if self.tiers.kv else []), *weights]


class Bucket(NamedTuple):
    """Tokens, and the compiled sizes that hold them and their masked rows.

    A step beside a pool has no tokens of its own: `context` is 0, for the pool is planned elsewhere.
    """

    context: int
    rows: int
    head_rows: int

    def batch_bytes(self, level: Level) -> int:
        """Bytes of the batch and of the trace that comes back."""
        trace = (5 * steps_per_dispatch(self.head_rows) + listed_bytes(level)) * self.head_rows
        return 16 * self.rows + 12 * self.head_rows + trace + (64 << 10)


def plan_memory(
    workload: Workload, context: int, budget: Budget, *, host_tiers: bool | Sequence[HostTiers] = True
) -> MemoryPlan:
    """Plan one step: the cheapest way in latency that fits.

    Arguments:
    - `workload`, `budget`: the model and its requests, and the memory that may be used.
    - `context`: tokens of the sequence, masks included.
    - `host_tiers`: whether host memory may be used where the device is too small, as `LLM` would, or which
      tiers to try.

    Returns the plan; where nothing fits, the last that was tried, with `fits` false.
    Source: Mosaic (global memory planning and dynamic peak taming), and host tiers beyond it.
    """
    weights = param_bytes(workload.config, workload.dtype)
    tiers = _tiers(workload, host_tiers)
    step = plan_bucket(workload, bucket_of(workload, context), budget.beside(weights), tiers)
    return MemoryPlan(**vars(step), budget=budget, weights_bytes=weights)


def bucket_of(workload: Workload, context: int) -> Bucket:
    """The compiled sizes that hold a sequence of so many tokens; raises `ConfigError` for no length."""
    if not 1 <= context <= LONGEST:
        raise ConfigError(f"context is {context}, expected 1 to {LONGEST} tokens")
    head_rows = head_bucket(max(1, round(context * workload.mask_ratio)))
    return Bucket(context, row_bucket(context), head_rows)


def plan_bucket(
    workload: Workload, bucket: Bucket, room: StepRoom, tiers: Iterable[HostTiers] = ()
) -> StepPlan:
    """Plan one step of compiled sizes in the room that is left for it.

    Arguments:
    - `workload`, `bucket`: the model and its requests, and the compiled sizes of the step.
    - `room`: what the step may use.
    - `tiers`: tried in order where the device is too small.

    Returns the plan; where nothing fits, the last that was tried, with `fits` false.
    """
    plan = _plan_on_device(workload, bucket, room)
    for rung in () if plan.fits or workload.caches else tiers:
        plan = _plan_tiered(workload, bucket, room, rung)
        if plan.fits:
            break
    return plan


def max_context(workload: Workload, budget: Budget, *, host_tiers: bool | Sequence[HostTiers] = True) -> int:
    """The longest context that fits beside the weights, a value of the row ladder; 0 where none does."""
    room = budget.beside(param_bytes(workload.config, workload.dtype))
    return longest_context(workload, room, _tiers(workload, host_tiers))


def longest_context(workload: Workload, room: StepRoom, tiers: Sequence[HostTiers] = ()) -> int:
    """The longest context whose step fits the room, with one of the `tiers` where the device is too small."""
    return longest_fitting(lambda rows: plan_bucket(workload, bucket_of(workload, rows), room, tiers).fits)


def longest_fitting(fits: Callable[[int], bool]) -> int:
    """The longest number of rows of the row ladder whose step fits; 0 where none does.

    By bisection, and then a look back: the division of rows into equal chunks may leave a gap below the
    longest, and everything up to the result should fit.

    Arguments:
    - `fits`: whether a step of so many rows fits.
    """
    ladder = row_ladder()
    longest = largest(fits, ladder)
    if longest is None:
        return 0
    place = ladder.index(longest)
    gaps = [i for i in range(max(0, place - _LOOK_BACK), place) if not fits(ladder[i])]
    return ladder[gaps[0] - 1] if gaps else longest


def least_room(workload: Workload, bucket: Bucket, room: StepRoom, tiers: Sequence[HostTiers] = ()) -> int:
    """The fewest bytes of the device that hold a step which does not fit `room`, with one of the `tiers`."""

    def fits(device: int) -> bool:
        return plan_bucket(workload, bucket, room._replace(device=device), tiers).fits

    whole = _plan_on_device(workload, bucket, UNLIMITED)
    return bisect.bisect_left(range(whole.step_bytes), True, lo=max(0, room.device + 1), key=fits)


def check(workload: Workload, plan: MemoryPlan) -> MemoryPlan:
    """Return `plan`, or raise `MemoryBudgetError` where it does not fit."""
    if plan.fits:
        return plan
    raise refusal(workload, plan.bucket, plan.room, rungs(workload.config) if plan.tiers else ())


def refusal(
    workload: Workload,
    bucket: Bucket,
    room: StepRoom,
    tiers: Sequence[HostTiers],
    *,
    what: str | None = None,
    surplus: int = 0,
    compiled: int = 0,
    helps: str | None = None,
) -> MemoryBudgetError:
    """The error for a step that does not fit.

    Arguments:
    - `workload`, `bucket`: the model and its requests, and the compiled sizes of the step.
    - `room`, `tiers`: what the step may use, and the host tiers that were tried.
    - `what`: the step, by default by its rows.
    - `surplus`: bytes that the compiler asks for beyond the plan.
    - `compiled`: bytes of the room that the compiler asks for, where it was asked.
    - `helps`: of `MemoryBudgetError`.
    """
    left = room._replace(device=room.device - surplus)
    needed = max(compiled, surplus + least_room(workload, bucket, left, tiers))
    alike = dataclasses.replace(workload, mask_ratio=min(1.0, bucket.head_rows / bucket.rows))
    return MemoryBudgetError(
        what or f"a step of {bucket.rows} rows, {bucket.head_rows} of them masked,",
        room.held + needed,
        room.held + room.device,
        longest_context(alike, left, tiers),
        helps=helps,
    )


@functools.cache
def row_ladder() -> list[int]:
    """All compiled numbers of rows, up to the number for the longest context."""
    rows, ladder = 1, []
    while rows <= LONGEST:
        ladder.append(row_bucket(rows))
        rows = ladder[-1] + 1
    return ladder


@functools.cache
def _cuts(rows: int) -> list[int]:
    """Counts that cut `rows` into equal chunks of whole tiles.

    A shorter last chunk would run outside the loop of the others, where XLA may compute parts of it early.
    """
    tiles = max(1, rows // TILE)
    return [count for count in range(1, min(_MOST_CHUNKS, tiles) + 1) if tiles % count == 0]


def ladders(workload: Workload, rows: int, head_rows: int) -> dict[str, list[int]]:
    """The counts that each component may take for a bucket, the least first."""
    config = workload.config
    first = 1 if workload.max_num_logits is None else -(-head_rows // workload.max_num_logits)
    powers = [first * 2**i for i in range(32) if first * 2**i <= max(first, head_rows)]
    cuts = _cuts(rows)
    groups = [1]
    # A refresh stores the keys and values of all heads at once.
    for count in () if workload.caches else range(2, config.num_kv_heads + 1):
        # The outputs of all groups are kept, so a few groups may need more than none.
        saved = 2 * config.num_kv_heads * (count - 1) / count
        if config.num_kv_heads % count == 0 and saved > config.num_heads:
            groups.append(count)
    return {"logits": powers, "ffn": cuts, "query": cuts, "kv": cuts, "heads": groups}


def _plan_on_device(workload: Workload, bucket: Bucket, room: StepRoom) -> StepPlan:
    start = time.perf_counter()
    template = step_template(workload.config, workload.kind)
    return _planned(workload, bucket, room, template, None, start)


def _plan_tiered(workload: Workload, bucket: Bucket, room: StepRoom, tiers: HostTiers) -> StepPlan:
    start = time.perf_counter()
    template = tier_template(workload.config, workload.kind, tiers, bucket.rows, workload.dtype)
    return _planned(workload, bucket, room, template, tiers, start)


def _planned(
    workload: Workload,
    bucket: Bucket,
    room: StepRoom,
    template: GraphTemplate,
    tiers: HostTiers | None,
    start: float,
) -> StepPlan:
    config, dtype = workload.config, workload.dtype
    counts = ladders(workload, bucket.rows, bucket.head_rows)
    if tiers is not None:
        counts = {"logits": counts["logits"]}
    pool = workload.kv_pool_bytes(bucket.context)
    batch = bucket.batch_bytes(workload.level)
    left = room.device - pool - batch
    activation = search(template, {"T": bucket.rows, "M": bucket.head_rows}, counts, left)
    return StepPlan(
        **bucket._asdict(),
        room=room,
        kv_pool_bytes=pool,
        batch_bytes=batch,
        activation=activation,
        chunks=ChunkConfig(**activation.counts),
        tiers=tiers,
        host_bytes=0 if tiers is None else sum(host_buffers(config, tiers, bucket.rows, dtype).values()),
        seconds=time.perf_counter() - start,
    )


def _tiers(workload: Workload, host_tiers: bool | Sequence[HostTiers]) -> Sequence[HostTiers]:
    return rungs(workload.config) if host_tiers is True else host_tiers or ()


def rungs(config: ModelConfig) -> list[HostTiers]:
    """Host tiers in rising order of their cost in latency."""
    groups = [count for count in range(1, config.num_kv_heads + 1) if config.num_kv_heads % count == 0]
    return [
        *(HostTiers(chunk_rows=4096, head_groups=count) for count in groups),
        *(HostTiers(chunk_rows=rows, kv=True) for rows in _TIER_ROWS),
    ]
