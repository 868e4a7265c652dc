"""The memory account of an engine, made once at its start.

Weights come first, then what the driver and other models hold, then the largest step. What is left is the
pool of keys and values, which never grows.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp

from jdllm.chunks import TILE
from jdllm.errors import ConfigError
from jdllm.execution.offload.placement import device_weight_bytes
from jdllm.execution.offload.tiers import HostTiers
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.execution.paged.stored_keys import gathering_bytes
from jdllm.models.config import ModelConfig
from jdllm.models.weights import param_bytes
from jdllm.pallas.device import Target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import head_bucket, row_bucket
from jdllm.planning.budget import Budget, MemoryBudgetError, format_bytes
from jdllm.planning.plan import (
    LONGEST,
    Bucket,
    MemoryPlan,
    Workload,
    max_context,
    plan_bucket,
    refusal,
    row_ladder,
    rungs,
)
from jdllm.planning.search import largest

_LOGITS_ROWS = (512, 256, 128, 64, 32, 16)
"""Head rows whose logits may exist at a time in refreshes and reuses, the most first."""

UNPLANNED_POOL = 1 << 30
"""Bytes of the pool where there is no budget."""

_DIGITS = 4
_MARGIN = 16


@dataclasses.dataclass(frozen=True)
class Account:
    """What an engine holds on its device.

    - `budget`: what may be used; `None` for a CPU without `memory`.
    - `weights`, `verifier`: bytes of the model's weights and of the verifier's.
    - `steps`: bytes of the largest step of each kind, temporaries and batch: "full" (whole sequences that
      store nothing), "refresh" and "reuse". Steps run one at a time, so that only the largest counts. Of a
      kind that cannot run beside the pool it is 0.
    - `rows`: packed rows of the largest step.
    - `max_num_logits`: head rows whose logits exist at a time in refreshes and reuses.
    - `max_context`: the longest sequence whose full steps run beside the pool, whatever is sampled.
    - `max_refresh`: the longest sequence whose refreshes do; 0 where requests cannot be cached.
    - `longest`: the longest sequence whose full steps run once the pool is given up, with host memory as the
      budget has it: what `jdllm plan` promises. Unusual sampling may need a little more; the plan of a step
      has the last word.
    - `pages`, `page_bytes`: of the pool, the scratch page included.
    - `unlike_planned`: bytes by which `weights` differ from what plans count.
    - `offloaded`: layers whose weights are in host memory. Then there is no pool, and steps are cut to fit on
      the device only.
    """

    budget: Budget | None
    weights: int
    verifier: int
    steps: Mapping[str, int]
    rows: int
    max_num_logits: int
    max_context: int
    max_refresh: int
    longest: int
    pages: int
    page_bytes: int
    unlike_planned: int = 0
    offloaded: int = 0

    @property
    def prepare_rows(self) -> int:
        """Packed rows of the largest evaluation that prepares a long context."""
        return min(self.rows, self.max_refresh)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.pages * self.page_bytes

    @property
    def largest_step(self) -> int:
        """Bytes of the largest step."""
        return max(self.steps.values())

    def step_budget(self, rows: int) -> Budget | None:
        """What a step of so many packed rows may use, in the terms of `plan_bucket`.

        Up to `max_context` rows the pool stays, and counts as overhead. Beyond, it has to be given up before
        the step runs.
        """
        if self.budget is None:
            return None
        beside = self.verifier + self.unlike_planned + (self.pool_bytes if rows <= self.max_context else 0)
        return _less(self.budget, beside)

    def table(self) -> list[tuple[str, int]]:
        """Names and bytes of all that the device holds; they sum up to the budget where there is one."""
        rows = [("weights", self.weights)]
        if self.verifier:
            rows.append(("verifier", self.verifier))
        if self.budget is not None:
            rows.append(("overhead", self.budget.overhead))
        rows += [("largest step", self.largest_step), ("KV pool", self.pool_bytes)]
        if self.budget is not None:
            rows.append(("left", self.budget.device - sum(size for _, size in rows)))
        return rows


def make_account(
    config: ModelConfig,
    dtype: str,
    budget: Budget | None,
    *,
    device: Target,
    max_num_batched_tokens: int,
    max_num_logits: int | None = None,
    max_context: int | None = None,
    kv_pool: int | None = None,
    verifier_bytes: int = 0,
    weights_bytes: int | None = None,
    offloaded: int = 0,
) -> Account:
    """Share out a device.

    Refreshes and reuses run whole, so the pool leaves room for a whole step of `rows` rows and a sixteenth
    more, by which a compiled step may differ from its plan. Full steps are cut to fit beside the pool.

    Arguments:
    - `config`, `dtype`, `device`: as of `Workload`.
    - `budget`: what may be used; `None` for a CPU without `memory`.
    - `max_num_batched_tokens`: packed rows of one step. Where the budget is too small for a whole step of
      them beside a pool that holds as many, `rows` is the largest bucket below that fits so. Where none
      does, the pool has its scratch page only, and `rows` is as long as a full step can be.
    - `max_num_logits`: head rows whose logits may exist at a time; `None` for as many as fit in full steps,
      and in others for as many as need no more than the rest of the step, at most 512.
    - `max_context`: the pool leaves room for full steps of so many tokens; by default for those of `rows`.
    - `kv_pool`: bytes of the pool, 0 for none; by default all that is left, rounded down to a number of
      pages with few binary digits: executables depend on it, and outlast small changes of free memory.
    - `verifier_bytes`, `weights_bytes`: bytes on the device, the latter by default those of the model.
    - `offloaded`: layers whose weights are in host memory, which leaves no pool; `jdllm.planning.offloading`
      says how many.

    Raises `ConfigError` for a `kv_pool` or `max_context` that does not fit, and `MemoryBudgetError` where
    not even a step of the smallest bucket does.
    """
    model = _Model(config, dtype, device, max_num_logits, () if offloaded else tuple(rungs(config)))
    page_bytes, planned = pool_bytes(config, dtype, 1, PAGE_ROWS), param_bytes(config, dtype)
    weights = device_weight_bytes(config, dtype, offloaded) if weights_bytes is None else weights_bytes
    pages = 1 if offloaded else None if kv_pool is None else _asked_pages(kv_pool, page_bytes)
    rows = max_num_batched_tokens
    if budget is None:
        return Account(
            budget=None,
            weights=weights,
            verifier=verifier_bytes,
            steps=dict.fromkeys(("full", "refresh", "reuse"), model.whole(rows)),
            rows=rows,
            max_num_logits=model.logits_rows(rows),
            max_context=LONGEST,
            max_refresh=LONGEST,
            longest=LONGEST,
            pages=pages or _rounded(max(1, UNPLANNED_POOL // page_bytes)),
            page_bytes=page_bytes,
            unlike_planned=weights - planned,
        )
    shared = _Device(model, _less(budget, verifier_bytes), weights, page_bytes)
    if max_context is not None:
        shared.check_context(max_context, pages or 1)
    if pages is None:
        rows, pages = shared.share(rows, max_context)
    elif pages > 1:
        shared.check_pool(rows, pages)
    beside, longest = shared.longest(pages), model.longest(shared.beside(0))
    if pages == 1:
        rows = min(rows, beside or longest)
    if not rows:
        raise shared.nothing_fits()
    account = Account(
        budget=budget,
        weights=weights,
        verifier=verifier_bytes,
        steps={},
        rows=rows,
        max_num_logits=model.logits_rows(rows),
        max_context=beside,
        max_refresh=shared.longest_refresh(pages) if pages > 1 else 0,
        longest=max(beside, longest),
        pages=pages,
        page_bytes=page_bytes,
        unlike_planned=weights - planned,
        offloaded=offloaded,
    )
    return dataclasses.replace(account, steps=_steps(model, account, max_context or 0))


def _steps(model: "_Model", account: Account, context: int) -> dict[str, int]:
    """Bytes of the largest step of each kind, where full ones have up to `context` rows or `account.rows`."""
    whole = model.whole(account.rows) if account.max_refresh else 0
    rows = max(account.rows, context)
    budget = account.step_budget(_compiled(rows))
    full = model.full(rows, budget) if budget is not None and (not whole or rows > account.rows) else whole
    return {"full": max(whole, full), "refresh": whole, "reuse": whole}


def _less(budget: Budget, size: int) -> Budget:
    """A budget of whose bytes `size` are not for steps."""
    return dataclasses.replace(budget, overhead=budget.overhead + size)


def _asked_pages(kv_pool: int, page_bytes: int) -> int:
    if kv_pool and kv_pool < 2 * page_bytes:
        raise ConfigError(
            f"kv_pool is {format_bytes(kv_pool)}, and its least is {format_bytes(2 * page_bytes, math.ceil)}:"
            " a page and the scratch page; 0 is no pool"
        )
    return max(1, kv_pool // page_bytes)


def _unit(pages: int) -> int:
    """What numbers of about `pages` pages are rounded to: their highest binary digits are left."""
    return 1 << max(0, pages.bit_length() - _DIGITS)


def _rounded(pages: int) -> int:
    return pages // _unit(pages) * _unit(pages)


def _round_numbers(most: int) -> list[int]:
    """All numbers of pages from 1 to `most` that are round."""
    numbers = [1]
    while (following := numbers[-1] + _unit(numbers[-1])) <= most:
        numbers.append(following)
    return numbers


@dataclasses.dataclass(frozen=True)
class _Model:
    """What steps of one model need, whatever else the device holds."""

    config: ModelConfig
    dtype: str
    device: Target
    max_num_logits: int | None
    tiers: tuple[HostTiers, ...]

    def workload(self, level: Level) -> Workload:
        """Full steps that evaluate every row."""
        return Workload(self.config, self.dtype, self.device, 1.0, level, max_num_logits=self.max_num_logits)

    def logits_rows(self, rows: int) -> int:
        """Head rows whose logits exist at a time in a step of `rows` rows that no plan cuts."""
        if self.max_num_logits is not None:
            return self.max_num_logits
        least = _whole(self, rows, _LOGITS_ROWS[-1])
        return next(count for count in _LOGITS_ROWS if _whole(self, rows, count) <= least)

    def whole(self, rows: int) -> int:
        """Bytes of a step of `rows` rows in which no operator of a layer is cut, whatever is sampled."""
        whole = _whole(self, rows, self.logits_rows(rows))
        return max(whole, self._gathering(rows)) if self.config.attention == "causal" else whole

    def _gathering(self, rows: int) -> int:
        """Bytes of a part of a prompt while it sees what is stored: of few rows gathered keys are most."""
        config, itemsize = self.config, jnp.dtype(self.dtype).itemsize
        widths = 2 * config.hidden_size + 3 * config.num_heads * config.head_dim
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return rows * widths * itemsize + gathering_bytes(rows, *heads, itemsize)

    def full(self, rows: int, budget: Budget) -> int:
        """Bytes of a full step of `rows` rows that is cut to fit, whatever is sampled."""
        return max(
            _step_bytes(plan_bucket(self.workload(level), _bucket(rows), budget, self.tiers))
            for level in Level
        )

    def longest_on_device(self, budget: Budget) -> int:
        """The longest context that fits at every level; 0 where none does."""
        return min(max_context(self.workload(level), budget, host_tiers=False) for level in Level)

    def longest(self, budget: Budget) -> int:
        """The longest context that fits by the default workload, with host memory; 0 where none does."""
        workload = Workload(self.config, self.dtype, self.device, max_num_logits=self.max_num_logits)
        return max_context(workload, budget, host_tiers=self.tiers)


@functools.lru_cache(maxsize=4096)
def _whole(model: _Model, rows: int, logits_rows: int) -> int:
    """`_Model.whole` with so many rows of logits at a time; sharing out asks for the same rows repeatedly."""
    workloads = (
        dataclasses.replace(model.workload(level), cache_policy="dual", max_num_logits=logits_rows)
        for level in Level
    )
    unlimited = Budget(1 << 62, 0, 0)
    return max(_step_bytes(plan_bucket(workload, _bucket(rows), unlimited)) for workload in workloads)


def _step_bytes(plan: MemoryPlan) -> int:
    return plan.activation.peak_bytes + plan.batch_bytes


def _compiled(rows: int) -> int:
    """The rows that are planned for a step of `rows`: its bucket, in whole tiles."""
    return max(row_bucket(rows), -(-rows // TILE) * TILE)


def _bucket(rows: int) -> Bucket:
    rows = _compiled(rows)
    return Bucket(0, rows, head_bucket(rows))


@dataclasses.dataclass(frozen=True)
class _Device:
    """A device with the weights on it, whose rest the largest step and the pool share.

    - `budget`: what may be used, the verifier counted as overhead.
    - `weights`, `page_bytes`: bytes, as of `Account`.
    """

    model: _Model
    budget: Budget
    weights: int
    page_bytes: int

    def left(self, rows: int) -> int:
        """Bytes beside a whole step of `rows` rows; negative where it does not fit."""
        whole = self.model.whole(rows)
        return self.budget.device - self.budget.overhead - self.weights - whole - whole // _MARGIN

    def beside(self, pages: int) -> Budget:
        """What is left beside a pool, in the terms of `plan_bucket`, which counts the model's weights."""
        unlike = self.weights - param_bytes(self.model.config, self.model.dtype)
        return _less(self.budget, unlike + pages * self.page_bytes)

    def longest(self, pages: int) -> int:
        """The longest context whose full steps run beside a pool, whatever is sampled; 0 where none does."""
        return self.model.longest_on_device(self.beside(pages))

    def longest_refresh(self, pages: int) -> int:
        """The longest context that is refreshed beside a pool."""
        pool = pages * self.page_bytes
        return largest(lambda rows: self.left(rows) >= pool, row_ladder()) or 0

    def share(self, most_rows: int, context: int | None) -> tuple[int, int]:
        """The most rows whose whole step fits beside a pool that holds as many, and the pages of that pool.

        One page where no step fits so.
        """
        most = self._most_pages(context)

        def pages(rows: int) -> int:
            return min(most, _rounded(max(0, self.left(rows) // self.page_bytes)))

        candidates = [*(rows for rows in row_ladder() if rows < most_rows), most_rows]
        rows = largest(lambda rows: pages(rows) > -(-rows // PAGE_ROWS), candidates)
        return (most_rows, 1) if rows is None else (rows, pages(rows))

    def _most_pages(self, context: int | None) -> int:
        """The most pages beside which full steps of `context` tokens run."""
        most = max(1, (self.budget.device - self.weights) // self.page_bytes)
        if context is None:
            return most
        return largest(lambda pages: self.longest(pages) >= context, _round_numbers(most)) or 1

    def check_pool(self, rows: int, pages: int) -> None:
        """Raise `ConfigError` where a pool does not fit beside a whole step of `rows` rows."""
        pool, left = pages * self.page_bytes, max(0, self.left(rows))
        if pool > left:
            raise ConfigError(
                f"kv_pool is {format_bytes(pool, math.ceil)} in whole pages, and the weights, the overhead"
                f" and a step of {rows} rows leave {format_bytes(left, math.floor)} of the memory,"
                f" {self._memory}: lower kv_pool or max_num_batched_tokens, or raise memory"
            )

    def check_context(self, context: int, pages: int) -> None:
        """Raise `ConfigError` where full steps of `context` tokens do not fit beside a pool."""
        if context > (longest := self.longest(pages)):
            pool = format_bytes(pages * self.page_bytes, math.ceil)
            raise ConfigError(
                f"max_context is {context} tokens, and beside a KV pool of {pool} the longest that fits the"
                f" memory, {self._memory}, is {longest}: lower max_context or kv_pool, or raise memory"
            )

    @property
    def _memory(self) -> str:
        return format_bytes(self.budget.device, math.floor)

    def nothing_fits(self) -> MemoryBudgetError:
        """The error for a budget in which not even the smallest step runs."""
        workload = self.model.workload(Level.TOP)
        what = f"with memory={self._memory} a step"
        return refusal(workload, _bucket(1), self.beside(0), self.model.tiers, what=what)
