"""How many layers' weights go to host memory where not all of them fit on the device."""

import bisect
import dataclasses
import functools
import math

from jdllm.byte_sizes import format_bytes
from jdllm.errors import ConfigError, DoesNotFitError
from jdllm.execution.offload.placement import device_weight_bytes, host_weight_bytes, most_offloaded
from jdllm.models.config import ModelConfig
from jdllm.pallas.device import Target
from jdllm.planning.account import Account, make_account
from jdllm.planning.budget import Budget
from jdllm.planning.ladder import DEFAULT_ROWS
from jdllm.planning.plan import MemoryPlan, Workload, bucket_of, longest_context, plan_bucket
from jdllm.planning.sharing import pages_of


def account_with_offloading(
    config: ModelConfig,
    dtype: str,
    budget: Budget,
    *,
    device: Target,
    max_num_batched_tokens: int | None = None,
    max_num_logits: int | None = None,
    max_context: int | None = None,
    kv_pool: int | None = None,
    verifier_bytes: int = 0,
) -> Account:
    """The account of an engine that has as many layers on the device as fit.

    All layers stay there if any step fits beside them, and a step of `max_context` tokens. Otherwise as few
    as possible go to host memory, so that such steps fit, and steps of `max_num_batched_tokens` rows, beside
    a pool that holds either. If this room is too small without any layer, all go.

    Arguments:
    - `config`, `dtype`: the model, and the type of its weights and activations.
    - `budget`: what may be used.
    - `device`: what the kernels of the model are chosen by.
    - `max_num_batched_tokens`: packed rows of one step; by default chosen from the memory.
    - `max_num_logits`: head rows whose logits may exist at a time; `None` for as many as fit.
    - `max_context`: the longest sequence that must fit; by default as long as the largest step.
    - `kv_pool`: bytes of the pool, 0 for none; by default all that is left.
    - `verifier_bytes`: of a verifier, all of which is on the device.

    Raises what `make_account` raises, and `DoesNotFitError` where host memory is too small for the rest.
    """
    account = functools.partial(
        make_account,
        config,
        dtype,
        budget,
        device=device,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_logits=max_num_logits,
        max_context=max_context,
        kv_pool=kv_pool,
        verifier_bytes=verifier_bytes,
    )
    try:
        return account()
    except ConfigError:
        if not budget.host:
            raise
    rows = max_num_batched_tokens or DEFAULT_ROWS[0]
    longest = max(rows, max_context or 0)

    def has_room(offloaded: int) -> bool:
        if device_weight_bytes(config, dtype, offloaded) + budget.overhead >= budget.device:
            return False
        try:
            found = account(offloaded=offloaded)
        except ConfigError:
            return False
        # A pool that was asked for may be small, where nobody needs keys of the longest sequence.
        least = longest if kv_pool is None else longest // 4
        stored, refreshed = found.pages > pages_of(least), found.max_refresh >= longest
        kept = stored and refreshed if kv_pool is None else refreshed or not stored
        return kept and found.rows >= rows and found.max_context >= longest

    most = most_offloaded(config)
    enough = 1 + bisect.bisect_left(range(1, most), True, key=has_room)
    return _checked(account(offloaded=enough), config, dtype, budget)


def plan_offloaded(workload: Workload, context: int, account: Account) -> MemoryPlan:
    """Plan one step of an engine that has layers in host memory.

    Arguments:
    - `workload`: the model and its requests.
    - `context`: tokens of the sequence, masks included.
    - `account`: of that engine.
    """
    config, dtype = workload.config, workload.dtype
    budget = _budget(account)
    step = plan_bucket(workload, bucket_of(workload, context), budget.beside(account.weights))
    away = host_weight_bytes(config, dtype, account.offloaded)
    return MemoryPlan(
        **vars(dataclasses.replace(step, host_bytes=away)),
        budget=budget,
        weights_bytes=account.weights,
        streamed_bytes=away,
    )


def longest_offloaded(workload: Workload, account: Account) -> int:
    """The longest context of such an engine."""
    return longest_context(workload, _budget(account).beside(account.weights))


def _budget(account: Account) -> Budget:
    if account.budget is None:
        raise ValueError("this account has no budget")
    return account.budget


def _checked(account: Account, config: ModelConfig, dtype: str, budget: Budget) -> Account:
    needed = host_weight_bytes(config, dtype, account.offloaded)
    if needed > budget.host:
        raise DoesNotFitError(
            f"the weights take {format_bytes(account.weights, math.ceil)} on the device and"
            f" {format_bytes(needed, math.ceil)} of host memory, and host_memory is"
            f" {format_bytes(budget.host, math.floor)}: raise memory or host_memory"
        )
    return account
