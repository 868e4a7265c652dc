"""The memory account of an engine, made once at its start.

Weights come first, then what the driver and other models hold, then the largest step. The rest is the
pool of keys and values, which never grows.
"""

import dataclasses
import math
from collections.abc import Mapping

from jdllm.byte_sizes import format_bytes
from jdllm.errors import ConfigError
from jdllm.execution.offload.placement import arriving_bytes, device_weight_bytes, host_weight_bytes
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.models.config import ModelConfig
from jdllm.pallas.device import Target
from jdllm.planning.budget import Budget, StepRoom
from jdllm.planning.ladder import DEFAULT_ROWS
from jdllm.planning.plan import LONGEST, rungs
from jdllm.planning.sharing import Sharing, less, rounded
from jdllm.planning.step_needs import StepNeeds, compiled_rows

UNPLANNED_POOL = 1 << 30
"""Bytes of the pool where there is no budget."""


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
    - `offloaded`: layers whose weights are in host memory. Then steps are cut to fit on the device only.
    - `streamed`: bytes of these layers, which every step moves to the device.
    - `sharing`: how the device is shared out, if there is a budget; with all weights on it.
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
    offloaded: int = 0
    streamed: int = 0
    sharing: Sharing | None = None

    @property
    def prepare_rows(self) -> int:
        """Packed rows of the largest evaluation that prepares a long context."""
        return min(self.rows, self.max_refresh)

    @property
    def arriving(self) -> int:
        """Bytes of `weights` for layers on their way from host memory, which the compiler counts among the
        temporaries of a step."""
        return arriving_bytes(self.streamed, self.offloaded)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.pages * self.page_bytes

    @property
    def largest_step(self) -> int:
        """Bytes of the largest step."""
        return max(self.steps.values())

    def step_room(self, rows: int) -> StepRoom | None:
        """The room for a step of so many packed rows; `None` where there is no budget.

        Up to `max_context` rows the pool stays. Beyond, it has to be given up before the step runs.
        """
        if self.budget is None:
            return None
        pool = self.pool_bytes if rows <= self.max_context else 0
        return self.budget.beside(self.weights + self.verifier + pool)

    def table(self) -> list[tuple[str, int]]:
        """Names and bytes of all that the device holds; they sum up to the budget where there is one."""
        rows = [("weights", self.weights)]
        if self.verifier:
            rows.append(("verifier", self.verifier))
        if self.budget is not None:
            rows.append(("overhead", self.budget.overhead))
        rows += [(f"largest step, {self.rows} rows", self.largest_step), ("KV pool", self.pool_bytes)]
        if self.budget is not None:
            rows.append(("left", self.budget.device - sum(size for _, size in rows)))
        return rows


def make_account(
    config: ModelConfig,
    dtype: str,
    budget: Budget | None,
    *,
    device: Target,
    max_num_batched_tokens: int | None = None,
    max_num_logits: int | None = None,
    max_context: int | None = None,
    kv_pool: int | None = None,
    verifier_bytes: int = 0,
    weights_bytes: int | None = None,
    offloaded: int = 0,
) -> Account:
    """Share out a device.

    Refreshes and reuses of several requests run whole, so the pool leaves room for a whole step of `rows`
    rows and a sixteenth more, by which a compiled step may differ from its plan. Full steps, and refreshes of
    a longer request, are cut to fit beside the pool.

    Arguments:
    - `config`, `dtype`: the model, and the type of its weights and activations.
    - `device`: what the kernels of the model are chosen by.
    - `budget`: what may be used; `None` for a CPU without `memory`.
    - `max_num_batched_tokens`: packed rows of one step. Where the budget is too small for a whole step of
      them beside a pool that holds as many, `rows` is the largest bucket below that fits so. Where none
      does, the pool has its scratch page only, and `rows` is as long as a full step can be. By default as
      many, of the sizes in `DEFAULT_ROWS`, as leave the pool at least 85 % of the bytes that it would have
      if steps took none; 8192 without a budget, with `offloaded` layers, and for a causal model, whose
      prompts are read in parts: larger parts only make others wait longer for their tokens.
    - `max_num_logits`: head rows whose logits may exist at a time; `None` for as many as fit in full steps,
      and in others for as many as need no more than the rest of the step, at most 512.
    - `max_context`: the pool leaves room for full steps of so many tokens, and for refreshes of them where
      these leave a pool of a quarter as many rows; by default for `rows` tokens.
    - `kv_pool`: bytes of the pool, 0 for none; by default all that is left, rounded down to a number of
      pages with few binary digits: executables depend on it, and outlast small changes of free memory.
    - `verifier_bytes`, `weights_bytes`: bytes on the device; by default the weights take the bytes of the
      model.
    - `offloaded`: layers whose weights are in host memory; `jdllm.planning.offloading` says how many.

    Raises `DoesNotFitError` for a `kv_pool` or `max_context` that does not fit, and `MemoryBudgetError` where
    not even a step of the smallest bucket does.
    """
    model = StepNeeds(config, dtype, device, max_num_logits, () if offloaded else tuple(rungs(config)))
    page_bytes = pool_bytes(config, dtype, 1, PAGE_ROWS)
    weights = device_weight_bytes(config, dtype, offloaded) if weights_bytes is None else weights_bytes
    pages = None if kv_pool is None else _asked_pages(kv_pool, page_bytes)
    rows = max_num_batched_tokens or DEFAULT_ROWS[0]
    if budget is None:
        return _unlimited(
            model, weights, verifier_bytes, rows, pages or rounded(max(1, UNPLANNED_POOL // page_bytes))
        )
    room = less(budget, verifier_bytes)
    chosen = DEFAULT_ROWS[:1] if offloaded else DEFAULT_ROWS
    shared = Sharing(model, room, weights, page_bytes, max_num_batched_tokens, pages, max_context, chosen)
    shared.check_context()
    shared.check_pool()
    rows, pages, max_refresh = shared.shares
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
        max_refresh=min(max_refresh, beside) if not config.in_parts else max_refresh,
        longest=max(beside, longest),
        pages=pages,
        page_bytes=page_bytes,
        offloaded=offloaded,
        streamed=host_weight_bytes(config, dtype, offloaded),
        sharing=shared,
    )
    return dataclasses.replace(account, steps=_steps(model, account, max_context or 0))


def _unlimited(model: StepNeeds, weights: int, verifier: int, rows: int, pages: int) -> Account:
    """The account of a device without a budget."""
    return Account(
        budget=None,
        weights=weights,
        verifier=verifier,
        steps=dict.fromkeys(("full", "refresh", "reuse"), model.whole(rows)),
        rows=rows,
        max_num_logits=model.logits_rows(rows),
        max_context=LONGEST,
        max_refresh=LONGEST,
        longest=LONGEST,
        pages=pages,
        page_bytes=pool_bytes(model.config, model.dtype, 1, PAGE_ROWS),
    )


def _steps(model: StepNeeds, account: Account, context: int) -> dict[str, int]:
    """Bytes of the largest step of each kind, where full ones have up to `context` rows or `account.rows`."""
    whole = model.whole(account.rows) if account.max_refresh else 0
    rows = max(account.rows, context)
    room = account.step_room(compiled_rows(rows))
    full = model.full(rows, room) if room is not None and (not whole or rows > account.rows) else whole
    return {"full": max(whole, full), "refresh": whole, "reuse": whole}


def _asked_pages(kv_pool: int, page_bytes: int) -> int:
    if kv_pool and kv_pool < 2 * page_bytes:
        raise ConfigError(
            f"kv_pool is {format_bytes(kv_pool)}, and its least is {format_bytes(2 * page_bytes, math.ceil)}:"
            " a page and the scratch page; 0 is no pool"
        )
    return max(1, kv_pool // page_bytes)
