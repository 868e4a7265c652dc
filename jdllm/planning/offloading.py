"""How many layers' weights go to host memory where the device has no room to work beside all of them."""

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

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

_USUAL = 4096


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
    """The account of an engine that has as many layers on the device as leave room to work in.

    All layers stay there if a default engine holds a sequence of `usual_context` tokens beside them, and if
    what was asked for runs there: full steps of `max_context` tokens, beside a `kv_pool`. In a smaller budget
    all stay too if the engine that was asked for holds such a sequence, or one as long as its steps, and one
    of `max_context` tokens.

    Otherwise as few as possible go to host memory, so that the engine holds these sequences, and has steps of
    `max_num_batched_tokens` rows beside a pool that holds as many. These are by default as many as
    `usual_context`, and 8192 where no step fits beside all layers. If this room is too small without any
    layer, all go. If host memory is too small for them, all stay where any step fits.

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
    default = functools.partial(
        make_account,
        config,
        dtype,
        budget,
        device=device,
        max_num_logits=max_num_logits,
        verifier_bytes=verifier_bytes,
    )
    sizes = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_context": max_context,
        "kv_pool": kv_pool,
    }
    account = functools.partial(default, **sizes)
    if not budget.host:
        return account()
    usual, whole = usual_context(config, max_context), _made(account)
    if whole is not None:
        plain = _made(default) if any(sizes.values()) else whole
        asked = max(min(usual, max_num_batched_tokens or usual), max_context or 0)
        if _holds(plain, usual, None) or _holds(whole, asked, kv_pool):
            return whole
    rows = max_num_batched_tokens or (DEFAULT_ROWS[0] if whole is None else usual)
    longest = max(rows, max_context or 0)

    def has_room(offloaded: int) -> bool:
        if device_weight_bytes(config, dtype, offloaded) + budget.overhead >= budget.device:
            return False
        found = _made(functools.partial(account, offloaded=offloaded))
        return found is not None and found.rows >= rows and _holds(found, longest, kv_pool)

    most = most_offloaded(config)
    enough = 1 + bisect.bisect_left(range(1, most), True, key=has_room)
    if whole is not None and host_weight_bytes(config, dtype, enough) > budget.host:
        return whole
    return _checked(account(offloaded=enough), config, dtype, budget)


def usual_context(config: ModelConfig, max_context: int | None = None) -> int:
    """Tokens of a sequence for which an engine should have room where all layers are on the device: 4096, or
    fewer where nobody needs as many.

    Arguments:
    - `config`: the model, which may be made for fewer positions.
    - `max_context`: the longest sequence, where somebody said so.
    """
    positions = config.rope.effective_context(config.max_positions)
    return min(_USUAL, positions, max_context or _USUAL)


def holds_usual(account: Account | None) -> bool:
    """Whether an engine that nobody asked for sizes holds a sequence of `usual_context` tokens."""
    if account is None or account.sharing is None:
        return False
    return _holds(account, usual_context(account.sharing.needs.config), None)


def _made(account: Callable[[], Account]) -> Account | None:
    """An account; `None` where there is none."""
    with contextlib.suppress(ConfigError):
        return account()
    return None


def _holds(account: Account | None, tokens: int, kv_pool: int | None) -> bool:
    """Whether full steps of so many tokens run, and whether the pool has room for them, beside which their
    refreshes run; no step of a model that reads prompts in parts is as long. A pool that was asked for may be
    small, where nobody needs keys of so long a sequence."""
    if account is None or account.sharing is None:
        return False
    in_parts = account.sharing.needs.config.in_parts
    stored = account.pages > pages_of(tokens if kv_pool is None else tokens // 4)
    refreshed = in_parts or account.max_refresh >= tokens
    kept = stored and refreshed if kv_pool is None else refreshed or not stored
    return kept and account.max_context >= tokens


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
