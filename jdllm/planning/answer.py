"""Whether a context fits, in what step, how long the longest is, and which engine serves it."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jdllm.errors import ConfigError
from jdllm.execution.offload.tiers import HostTiers
from jdllm.planning.account import Account
from jdllm.planning.budget import Budget, MemoryBudgetError
from jdllm.planning.card import Card
from jdllm.planning.offloading import account_with_offloading, longest_offloaded, plan_offloaded
from jdllm.planning.plan import (
    MemoryPlan,
    Workload,
    least_device_bytes,
    max_context,
    plan_memory,
    row_ladder,
    rungs,
)
from jdllm.planning.room import Options, Room
from jdllm.planning.search import largest
from jdllm.planning.sharing import Sharing
from jdllm.planning.step_time import step_time


class Longest(NamedTuple):
    """The longest context that fits, 0 where none does, and the estimated seconds of a step of it."""

    context: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The answer to one question.

    - `workload`, `card`, `budget`: what was asked.
    - `plan`: of the step; where it does not fit, of the same step in the least budget that would do.
    - `refusal`: why it does not fit; `stop_reason` is "fits", or names what no chunk count lowers further.
    - `longest`, `on_device`: with host memory as the budget has it, and without.
    - `engine`: the account of an engine in this budget, or `None` where not even its smallest step fits.
    - `options`: what `LLM` has to be asked for so that it takes this context; nothing where its defaults do.
    """

    workload: Workload
    card: Card
    budget: Budget
    plan: MemoryPlan
    refusal: MemoryBudgetError | None
    stop_reason: str
    longest: Longest
    on_device: Longest
    engine: Account | None
    options: Options

    @property
    def positions(self) -> int:
        """Positions that the model is made for."""
        config = self.workload.config
        return config.rope.effective_context(config.max_positions)


def make_report(
    workload: Workload, card: Card, budget: Budget, context: int | None, given: Mapping[str, Any]
) -> Report:
    """Plan a step of `context` tokens, by default of as many as fit, and an engine.

    Arguments:
    - `given`: sizes of the engine that were asked for, arguments of `account_with_offloading`.

    Raises `ConfigError` for one of `given` that does not fit.
    """
    account = functools.partial(
        account_with_offloading,
        workload.config,
        workload.dtype,
        budget,
        device=workload.device,
        max_num_logits=workload.max_num_logits,
    )
    make = _cached if workload.caches else _uncached
    return make(workload, card, budget, context, account, given)


def _timed(workload: Workload, card: Card, budget: Budget, length: int, host: bool) -> Longest:
    if not length:
        return Longest(0, 0.0)
    found = plan_memory(workload, length, budget, host_tiers=host)
    return Longest(length, step_time(workload, found, card.target).seconds)


def _uncached(
    workload: Workload,
    card: Card,
    budget: Budget,
    asked: int | None,
    account: Callable[..., Account],
    given: Mapping[str, Any],
) -> Report:
    """A step of a sequence that stores nothing."""
    tiers = rungs(workload.config) if budget.host else []
    on_device = _timed(workload, card, budget, max_context(workload, budget, host_tiers=False), False)
    longest = on_device
    if tiers:
        longest = _timed(workload, card, budget, max_context(workload, budget, host_tiers=tiers), True)
    context = asked if asked is not None else max(1, longest.context)
    found = plan_memory(workload, context, budget, host_tiers=tiers)
    engine, options = _engine(account, given), {}
    if found.fits:
        return Report(workload, card, budget, found, None, "fits", longest, on_device, engine, options)
    beyond = _tried(account, {**given, "max_context": context})
    if beyond is not None:
        same = engine is not None and engine.offloaded == beyond.offloaded
        engine, options = beyond, {} if same else {"max_context": context}
    if engine is not None and engine.offloaded:
        most = longest_offloaded(workload, engine)
        context = most if longest.context == 0 and asked is None else context
        found = plan_offloaded(workload, context, engine)
        if found.fits:
            of_most = plan_offloaded(workload, most, engine)
            longest = Longest(most, step_time(workload, of_most, card.target).seconds)
            return Report(workload, card, budget, found, None, "fits", longest, on_device, engine, options)
    needed = least_device_bytes(workload, found.bucket, budget, tiers)
    enough_host = found.host_bytes <= budget.host
    stop_reason = found.activation.stop_reason if enough_host else "host memory is too small"
    return _refused(workload, card, budget, context, needed, stop_reason, longest, on_device, engine, tiers)


def _cached(
    workload: Workload,
    card: Card,
    budget: Budget,
    asked: int | None,
    account: Callable[..., Account],
    given: Mapping[str, Any],
) -> Report:
    """A refresh of a request with a cache. It fits where an engine takes the request, which
    may need `max_context`."""
    engine = _engine(account, given)
    sharing = None if engine is None else engine.sharing
    longest = Longest(0, 0.0)
    if sharing is not None:
        most = largest(lambda rows: _options(workload, sharing, rows) is not None, row_ladder()) or 0
        longest = _timed(workload, card, budget, most, False)
    context = asked if asked is not None else max(1, longest.context)
    options = None if sharing is None else _options(workload, sharing, context)
    if options is not None:
        engine = _tried(account, {**given, **options}) if options else engine
        found = plan_memory(workload, context, budget, host_tiers=False)
        return Report(workload, card, budget, found, None, "fits", longest, longest, engine, options)
    room, needed = room_of(workload, context), None
    if sharing is not None:
        needed = room.least_memory(dataclasses.replace(sharing, context=context))
    else:
        found = plan_memory(workload, context, budget, host_tiers=False)
        needed = least_device_bytes(workload, found.bucket, budget)
    return _refused(workload, card, budget, context, needed, "the KV pool", longest, longest, engine, [])


def room_of(workload: Workload, context: int) -> Room:
    """What a request of so many tokens takes by the workload's cache policy."""
    return Room(context, workload.stored_rows(context))


def _options(workload: Workload, sharing: Sharing, context: int) -> Options | None:
    """What has to be asked for so that an engine takes a request of `context` tokens; `None` where only more
    memory helps."""
    room = room_of(workload, context)
    if room.is_in(sharing):
        return {}
    if sharing.context is None and room.is_in(dataclasses.replace(sharing, context=context)):
        return {"max_context": context}
    return None


def _refused(
    workload: Workload,
    card: Card,
    budget: Budget,
    context: int,
    needed: int,
    stop_reason: str,
    longest: Longest,
    on_device: Longest,
    engine: Account | None,
    tiers: Sequence[HostTiers],
) -> Report:
    enough = dataclasses.replace(budget, device=needed)
    return Report(
        workload,
        card,
        budget,
        plan_memory(workload, context, enough, host_tiers=tiers),
        MemoryBudgetError(f"a step of {context} tokens", needed, budget.device, longest.context),
        stop_reason,
        longest,
        on_device,
        engine,
        {},
    )


def _engine(account: Callable[..., Account], given: Mapping[str, Any]) -> Account | None:
    """The account of the engine that was asked for; `None` where the budget has room for no step.

    Raises `ConfigError` for a size that was asked for and does not fit.
    """
    try:
        return account(**given)
    except MemoryBudgetError:
        return None
    except ConfigError:
        if any(given.get(name) for name in ("max_context", "kv_pool")):
            raise
        return None


def _tried(account: Callable[..., Account], options: Mapping[str, Any]) -> Account | None:
    """The account of an engine with these options; `None` where there is none."""
    with contextlib.suppress(ConfigError):
        return account(**options)
    return None
