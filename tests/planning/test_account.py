"""The memory account of an engine: whatever it admits fits, and more memory is never a smaller pool."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.shapes import SHAPES
from jdllm.demo import checkpoint_path
from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import HOPPER
from jdllm.pallas.masked_logits import Level
from jdllm.planning.account import Account, make_account
from jdllm.planning.buckets import head_bucket, row_bucket
from jdllm.planning.budget import Budget, MemoryBudgetError
from jdllm.planning.ladder import DEFAULT_ROWS
from jdllm.planning.plan import LONGEST, UNLIMITED, Bucket, StepPlan, Workload, plan_bucket, plan_memory

MIB, GIB = 2**20, 2**30
BUNDLED = config_from_hf(checkpoint_path())
CONFIGS = {**SHAPES, "bundled": BUNDLED}


def weights_of(config: ModelConfig, dtype: str) -> int:
    return (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config, dtype)))
        * np.dtype(dtype if dtype == "float32" else "float16").itemsize
    )


def page_of(config: ModelConfig, dtype: str) -> int:
    """Bytes of the keys and values of 64 rows in all layers."""
    return (
        2 * 64 * config.num_layers * config.num_kv_heads * config.head_dim * (4 if dtype == "float32" else 2)
    )


def account_of(
    config: ModelConfig, budget: Budget | None, dtype: str = "bfloat16", **options: Any
) -> Account:
    return make_account(
        config, dtype, budget, **{"device": HOPPER, "max_num_batched_tokens": 8192, **options}
    )


@functools.cache
def llada(mib: int, **options: Any) -> Account:
    return account_of(SHAPES["llada-8b"], Budget(mib * MIB), **options)


@dataclasses.dataclass(frozen=True)
class Case:
    """An account, and what a test adds up by itself."""

    config: ModelConfig
    dtype: str
    account: Account
    budget: Budget
    max_num_logits: int | None
    verifier: int

    def held(self, pool: bool) -> int:
        """Bytes on the device beside a step."""
        pages = self.account.pages * page_of(self.config, self.dtype) if pool else 0
        return weights_of(self.config, self.dtype) + self.budget.overhead + self.verifier + pages

    def workload(self, level: Level, **options: Any) -> Workload:
        return Workload(self.config, self.dtype, level=level, **options)

    def assert_fits(self, plan: StepPlan, pool: bool) -> None:
        step = plan.activation.peak_bytes + plan.batch_bytes
        assert self.held(pool) + step <= self.budget.device
        assert plan.host_bytes <= self.budget.host

    def check(self, refreshed: int, beside: int, alone: int) -> None:
        """Steps of so many rows fit: a refresh and a full one beside the pool, and one without it."""
        for level in Level if refreshed else ():
            cached = self.workload(level, cache_policy="dual", max_num_logits=self.account.max_num_logits)
            room = self.budget.beside(self.held(pool=True) - self.budget.overhead)
            longer = dataclasses.replace(cached, max_num_logits=self.max_num_logits or 512)
            plan = plan_bucket(longer, bucket(refreshed)._replace(context=0), room)
            assert plan.chunks.heads == 1
            self.assert_fits(plan, pool=True)
            whole = plan_bucket(cached, bucket(min(refreshed, self.account.rows)), UNLIMITED)
            assert whole.chunks.layers_whole
            self.assert_fits(whole, pool=True)
        for level in Level if beside else ():
            workload = self.workload(level, max_num_logits=self.max_num_logits)
            room = self.account.step_room(beside)
            assert room is not None
            plan = plan_bucket(workload, bucket(beside), room)
            assert plan.fits
            self.assert_fits(plan, pool=True)
        workload = self.workload(Level.TOP, max_num_logits=self.max_num_logits)
        plan = plan_memory(
            workload,
            alone,
            dataclasses.replace(self.budget, overhead=self.held(False) - weights_of(self.config, self.dtype)),
        )
        assert plan.fits
        self.assert_fits(plan, pool=False)


def bucket(rows: int) -> Bucket:
    return Bucket(rows, row_bucket(rows), head_bucket(rows))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(sorted(CONFIGS)))
    config = CONFIGS[name]
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    verifier, overhead = draw(st.sampled_from([0, 100 * MIB])), draw(st.sampled_from([0, 896 * MIB]))
    weights = weights_of(config, dtype)
    free = int(draw(st.floats(0.02, 30)) * (64 * MIB if name == "bundled" else GIB))
    budget = Budget(weights + overhead + verifier + free, overhead, draw(st.sampled_from([0, 64 * GIB])))
    max_num_logits = draw(st.sampled_from([None, 64, 1000]))
    kv_pool = draw(st.none() | st.floats(0, 1).map(lambda share: int(share * free)))
    try:
        account = account_of(
            config,
            budget,
            dtype,
            max_num_batched_tokens=draw(st.integers(1, 20000)),
            max_num_logits=max_num_logits,
            max_context=draw(st.none() | st.integers(1, 200_000)),
            kv_pool=kv_pool,
            verifier_bytes=verifier,
        )
    except ConfigError:
        assume(False)
        raise
    return Case(config, dtype, account, budget, max_num_logits, verifier)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases(), st.data())
def test_whatever_an_account_admits_fits(case: Case, data: st.DataObject):
    account = case.account
    assert sum(size for _, size in account.table()) == case.budget.device
    assert case.held(pool=True) + max(account.steps.values()) <= case.budget.device
    assert account.pool_bytes == account.pages * page_of(case.config, case.dtype)
    assert account.rows <= account.longest
    lengths = [account.max_refresh, account.max_context, account.longest]
    case.check(*lengths)
    case.check(*(data.draw(st.integers(min(1, length), length)) for length in lengths))


@pytest.mark.parametrize("mib", [16500, 16900, 24576])
def test_steps_fit_in_tight_budgets(mib: int):
    account = llada(mib)
    case = Case(SHAPES["llada-8b"], "bfloat16", account, Budget(mib * MIB), None, 0)
    case.check(account.max_refresh, account.max_context, account.longest)
    assert account.rows <= account.max_refresh <= account.max_context <= account.longest
    assert account.pages > account.rows / 64  # a pool for fewer tokens than a step has is of little use


@pytest.mark.parametrize("mib", [20480, 24576])
def test_logits_need_no_more_than_the_rest_of_a_step(mib: int):
    account = llada(mib)

    def step(logits_rows: int) -> int:
        workload = Workload(
            SHAPES["llada-8b"], level=Level.FILTERED, cache_policy="dual", max_num_logits=logits_rows
        )
        return plan_bucket(workload, bucket(account.rows), UNLIMITED).activation.peak_bytes

    assert step(account.max_num_logits) == step(1) < step(2 * account.max_num_logits)
    assert llada(mib, max_num_logits=100).max_num_logits == 100


def test_more_memory_is_no_smaller_pool():
    accounts = [llada(mib) for mib in (16800, 16900, 24576)]
    for less, more in itertools.pairwise(accounts):
        assert (less.rows, less.pages) <= (more.rows, more.pages)
        assert less.pages <= more.pages
        assert less.longest <= more.longest


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(sorted(CONFIGS)), st.lists(st.floats(0.05, 12), min_size=2, max_size=2))
def test_more_memory_is_no_smaller_pool_at_the_same_rows(name: str, gib: list[float]):
    weights = weights_of(CONFIGS[name], "bfloat16")
    less, more = (
        account_of(CONFIGS[name], Budget(weights + int(size * GIB), 0, 0), max_num_batched_tokens=2048)
        for size in sorted(gib)
    )
    assert less.rows <= more.rows
    assert less.rows < more.rows or less.pages <= more.pages


@pytest.mark.parametrize("rows", [508, 8192])
def test_the_bundled_model_in_64_mib(rows: int):
    budget = Budget(64 * MIB, 0, 0)
    account = account_of(BUNDLED, budget, "float32", max_num_batched_tokens=rows)
    assert 508 <= account.rows <= rows
    case = Case(BUNDLED, "float32", account, budget, None, 0)
    case.check(account.max_refresh, account.max_context, account.longest)
    case.check(account.rows, account.rows, account.rows)


def test_small_changes_of_free_memory_leave_the_pool_as_it_is():
    pages = {llada(mib).pages for mib in range(140_000, 141_000, 200)}
    assert len(pages) <= 2
    assert all(len(f"{count:b}".rstrip("0")) <= 4 for count in pages)


def test_the_pool_leaves_room_for_the_longest_context_asked_for():
    usual, long = llada(24576), llada(24576, max_context=131072)
    assert usual.max_context < 131072 <= long.max_context
    assert 1 < long.pages < usual.pages
    assert (long.rows, long.longest) == (usual.rows, usual.longest)
    room = long.step_room(131072)
    assert room is not None
    assert plan_bucket(Workload(SHAPES["llada-8b"], mask_ratio=1.0), bucket(131072), room).fits


def test_what_is_asked_for_must_fit():
    with pytest.raises(ConfigError, match=r"kv_pool is 8\.00 GiB .* memory, 24\.00 GiB: lower kv_pool or"):
        llada(24576, kv_pool=8 * GIB)
    with pytest.raises(ConfigError, match=r"kv_pool is 7\.00 MiB, and its least is 64\.00 MiB"):
        llada(24576, kv_pool=7 * MIB)
    with pytest.raises(
        ConfigError, match=r"max_context is 1048576 tokens.* the longest that fits the memory"
    ):
        llada(24576, max_context=1 << 20)
    with pytest.raises(MemoryBudgetError, match=r"with memory=15\.00 GiB a step needs .* no context fits"):
        llada(15 * 1024)


def test_a_pool_of_the_size_that_was_asked_for():
    account = llada(24576, kv_pool=4 * GIB + 7)
    assert (account.pool_bytes, account.rows) == (4 * GIB, 8192)
    none = llada(24576, kv_pool=0)
    assert (none.pages, none.max_refresh, none.steps["refresh"]) == (1, 0, 0)
    assert none.max_context > account.max_context


def test_a_step_beyond_the_pool_may_use_its_bytes():
    account = llada(24576, verifier_bytes=GIB)
    beside, alone = account.step_room(account.max_context), account.step_room(account.max_context + 1)
    assert beside is not None
    assert alone is not None
    assert alone.device - beside.device == account.pages * 32 * MIB
    assert alone.device == free_of(SHAPES["llada-8b"], 24576) - GIB
    assert dict(account.table())["verifier"] == GIB


@pytest.mark.parametrize(
    "options", [{"verifier_bytes": GIB}, {"weights_bytes": weights_of(SHAPES["llada-8b"], "bfloat16") + GIB}]
)
def test_what_else_is_on_the_device_counts(options: dict[str, int]):
    planned, less = llada(24576), llada(24576, **options)
    assert less.pages <= planned.pages - 28
    assert sum(size for _, size in less.table()) == 24 * GIB
    alone = less.step_room(LONGEST)
    assert alone is not None
    assert alone.device == free_of(SHAPES["llada-8b"], 24576) - GIB
    case = Case(SHAPES["llada-8b"], "bfloat16", less, Budget(24 * GIB), None, verifier=GIB)
    case.check(less.max_refresh, less.max_context, less.longest)


def test_without_a_budget_the_pool_has_a_gib(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.planning.account.UNPLANNED_POOL", GIB)  # that of tests is smaller
    account = account_of(BUNDLED, None, "float32", max_num_batched_tokens=2048)
    assert 0.75 * GIB < account.pool_bytes <= GIB
    assert (account.rows, account.max_context, account.longest) == (2048, LONGEST, LONGEST)
    assert account.step_room(1) is None
    assert dict(account.table())["KV pool"] == account.pool_bytes
    small = account_of(BUNDLED, None, "float32", kv_pool=4 * MIB)
    assert small.pages == 4 * MIB // page_of(BUNDLED, "float32")


def free_of(config: ModelConfig, mib: int) -> int:
    """Bytes beside the weights."""
    return mib * MIB - Budget(1).overhead - weights_of(config, "bfloat16")


def step_of(config: ModelConfig, rows: int) -> int:
    """Bytes of a refresh of so many rows, and a sixteenth more."""
    plans = (
        plan_bucket(
            Workload(config, level=level, cache_policy="dual", max_num_logits=16),
            bucket(rows),
            UNLIMITED,
        )
        for level in Level
    )
    return max(plan.activation.peak_bytes + plan.batch_bytes for plan in plans) * 17 // 16


@pytest.mark.parametrize(
    ("name", "mib", "rows"),
    [
        ("llada-8b", 22 * 1024, 8192),
        ("llada-8b", 24 * 1024, 12288),
        ("llada-8b", 40 * 1024, 36864),
        ("llada-8b", 80 * 1024, 36864),
        ("dream-7b", 24 * 1024, 8192),
        ("dream-7b", 40 * 1024, 24576),
        ("llada-moe-7b", 24 * 1024, 24576),
    ],
)
def test_the_default_step_is_the_largest_that_leaves_the_pool_its_share(name: str, mib: int, rows: int):
    config = CONFIGS[name]
    account = account_of(config, Budget(mib * MIB), max_num_batched_tokens=None)
    assert (account.rows, dict(account.table())[f"largest step, {rows} rows"]) == (rows, account.largest_step)
    free, place = free_of(config, mib), DEFAULT_ROWS.index(rows)
    if place:
        assert free - step_of(config, rows) >= 0.85 * free
        assert account.pages > rows / 64
    for more in DEFAULT_ROWS[place + 1 : place + 2]:
        left = free - step_of(config, more)
        assert left < max(0.85 * free, more * page_of(config, "bfloat16") / 64)


def test_where_nothing_is_shared_out_the_default_step_is_the_smallest():
    budget = Budget(80 * GIB)
    causal = dataclasses.replace(SHAPES["llada-8b"], attention="causal")
    options: dict[str, Any] = {"max_num_batched_tokens": None}
    assert account_of(BUNDLED, None, "float32", **options).rows == 8192
    assert account_of(causal, budget, **options).rows == 8192
    assert account_of(SHAPES["llada-8b"], Budget(12 * GIB), offloaded=12, **options).rows <= 8192


def test_the_default_step_leaves_room_for_the_pool_that_was_asked_for():
    usual = llada(24576, max_num_batched_tokens=None)
    pool = int(7.4 * GIB)
    account = llada(24576, max_num_batched_tokens=None, kv_pool=pool)
    assert account.rows < usual.rows
    assert account.pages == pool // page_of(SHAPES["llada-8b"], "bfloat16")
