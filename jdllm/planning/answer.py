"""Whether a context fits, in what step, how long the longest is, and which engine serves it."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jdllm.byte_sizes import parse_bytes
from jdllm.errors import ConfigError
from jdllm.execution.offload.placement import most_offloaded
from jdllm.execution.offload.tiers import HostTiers
from jdllm.planning.account import Account, make_account
from jdllm.planning.asking import could_move, moves_for
from jdllm.planning.budget import Budget, MemoryBudgetError
from jdllm.planning.card import Card
from jdllm.planning.layered import CACHES, Layered, LayeredPlan, longest_layered, plan_layered
from jdllm.planning.offloading import account_with_offloading, longest_offloaded, plan_offloaded
from jdllm.planning.plan import (
    MemoryPlan,
    Workload,
    least_room,
    max_context,
    plan_memory,
    rungs,
)
from jdllm.planning.room import Options, Room, longest_request
from jdllm.planning.sharing import Sharing
from jdllm.planning.step_time import StepTime, layered_time, step_time


class Longest(NamedTuple):
    """The longest context that fits, 0 where none does, and the estimated seconds of a step of it."""

    context: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepQuestion:
    """A question about a card.

    - `workload`, `card`, `budget`: the model and its step, where it runs, and what may be used; a verifier
      is part of the overhead.
    - `context`: tokens of the step; `None` for as many as fit.
    - `sizes`: of the engine, arguments of `account_with_offloading`.
    - `verifier`: bytes of a verifier.
    """

    workload: Workload
    card: Card
    budget: Budget
    context: int | None
    sizes: Mapping[str, Any]
    verifier: int = 0

    @property
    def overhead(self) -> int:
        """Bytes of the budget's overhead without a verifier."""
        return self.budget.overhead - self.verifier

    @property
    def positions(self) -> int:
        """Positions that the model is made for."""
        config = self.workload.config
        return config.rope.effective_context(config.max_positions)

    def account(self, **changed: Any) -> Account:
        """The account of an engine with other sizes than those that were asked for; raises `ConfigError`."""
        make = make_account if "offloaded" in changed else account_with_offloading
        return make(
            self.workload.config,
            self.workload.dtype,
            self.budget,
            device=self.workload.device,
            max_num_logits=self.workload.max_num_logits,
            **{**self.sizes, **changed},
        )

    def tried(self, **changed: Any) -> Account | None:
        """The same, or that of an engine with so many layers `offloaded`; `None` where there is none."""
        with contextlib.suppress(ConfigError):
            return self.account(**changed)
        return None

    @property
    def moves_layers(self) -> bool:
        """Whether a longer context may move layers to host memory: nobody asked for sizes that say otherwise,
        and there is host memory."""
        asked = any(self.sizes.get(name) for name in ("max_context", "kv_pool"))
        return bool(self.budget.host) and not asked

    def engine(self) -> Account | None:
        """The account of the engine that was asked for; `None` where the budget has room for no step.

        Raises `ConfigError` for a size that was asked for and does not fit.
        """
        try:
            return self.account()
        except MemoryBudgetError:
            return None
        except ConfigError:
            if any(self.sizes.get(name) for name in ("max_context", "kv_pool")):
                raise
            return None

    def plan(self, context: int, tiers: Sequence[HostTiers] = ()) -> MemoryPlan:
        """The plan of a step of so many tokens."""
        return plan_memory(self.workload, context, self.budget, host_tiers=tiers)

    def timed(self, context: int, tiers: Sequence[HostTiers] = ()) -> Longest:
        """How long a step of a context that fits takes; 0 where none does."""
        return self.taking(self.plan(context, tiers)) if context else Longest(0, 0.0)

    def taking(self, plan: MemoryPlan) -> Longest:
        """The context of a plan, and how long its step takes."""
        return Longest(plan.context, step_time(self.workload, plan, self.card.target).seconds)

    def beyond_pool(self, engine: Account) -> Layered | None:
        """What plans of requests need that the pool of an engine cannot hold, and that run layer by layer;
        `None` where no requests with this cache do."""
        if self.workload.cache_policy not in CACHES:
            return None
        return Layered.of_account(self.workload.config, self.workload.dtype, engine)


@dataclasses.dataclass(frozen=True)
class Report:
    """The answer to one question.

    - `question`: the question; its `workload`, `card` and `budget` are the report's too.
    - `plan`: of the step; where it does not fit, of the same step in the least budget that would do.
    - `refusal`: why it does not fit; `stop_reason` is "fits", or names what no chunk count lowers further.
    - `longest`, `on_device`: with host memory as the budget has it, and without.
    - `engine`: the account of an engine in this budget, or `None` where not even its smallest step fits.
    - `options`: what `LLM` has to be asked for so that it takes this context, with a cache in its pool;
      nothing where its defaults do.
    - `layered`: how a request runs that the pool cannot hold, layer by layer with keys in host memory; `None`
      where it does not. Then `plan` is of the same step as if it ran at once.
    """

    question: StepQuestion
    plan: MemoryPlan
    refusal: MemoryBudgetError | None
    stop_reason: str
    longest: Longest
    on_device: Longest
    engine: Account | None
    options: Options
    layered: LayeredPlan | None = None

    @property
    def time(self) -> StepTime:
        """How long the step takes."""
        workload, target = self.workload, self.card.target
        if self.layered is None or self.engine is None:
            return step_time(workload, self.plan, target)
        return layered_time(workload, self.plan, self.layered, self.engine.streamed, target)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the step."""
        if self.layered is None or self.engine is None:
            return self.plan.host_bytes
        return self.layered.host_bytes + self.engine.streamed

    @property
    def workload(self) -> Workload:
        return self.question.workload

    @property
    def card(self) -> Card:
        return self.question.card

    @property
    def budget(self) -> Budget:
        return self.question.budget

    @property
    def positions(self) -> int:
        return self.question.positions


def make_report(question: StepQuestion) -> Report:
    """Plan a step of the context that was asked for, by default of as many tokens as fit, and an engine.

    Raises `ConfigError` for a size of the engine that does not fit.
    """
    return _cached(question) if question.workload.caches else _uncached(question)


def _uncached(asked: StepQuestion) -> Report:
    """A step of a sequence that stores nothing."""
    workload, budget, engine = asked.workload, asked.budget, asked.engine()
    tiers = rungs(workload.config) if budget.host else []
    on_device = longest = asked.timed(max_context(workload, budget, host_tiers=False))
    if tiers:
        longest = asked.timed(max_context(workload, budget, host_tiers=tiers), tiers)
    longest = _longest_moving(asked, engine, longest)
    context, options = asked.context if asked.context is not None else max(1, longest.context), {}
    found = asked.plan(context, tiers)
    if found.fits:
        return Report(asked, found, None, "fits", longest, on_device, engine, options)
    takes = engine is not None and engine.offloaded and plan_offloaded(workload, context, engine).fits
    beyond = None if takes else asked.tried(max_context=context)
    if beyond is not None:
        same = engine is not None and engine.offloaded == beyond.offloaded
        engine, options = beyond, {} if same else {"max_context": context}
    room = found.room
    if engine is not None and engine.offloaded:
        found = plan_offloaded(workload, context, engine)
        if found.fits:
            return Report(asked, found, None, "fits", longest, on_device, engine, options)
    needed = room.held + least_room(workload, found.bucket, room, tiers)
    enough_host = found.host_bytes <= budget.host
    stop_reason = found.activation.stop_reason if enough_host else "host memory is too small"
    return _refused(asked, context, needed, stop_reason, longest, on_device, engine, tiers)


def _longest_moving(asked: StepQuestion, engine: Account | None, known: Longest) -> Longest:
    """The longest context of a full step with layers in host memory, or `known` where that is no longer."""
    workload = asked.workload
    if engine is not None and engine.offloaded:
        most = longest_offloaded(workload, engine)
        known = asked.taking(plan_offloaded(workload, most, engine)) if most > known.context else known
    roomiest = asked.tried(offloaded=most_offloaded(workload.config)) if asked.moves_layers else None
    if roomiest is not None and roomiest.sharing is not None:
        most = roomiest.sharing.longest(1)
        other = asked.tried(max_context=most) if most > known.context else None
        if other is not None and other.offloaded:
            return asked.taking(plan_offloaded(workload, most, other))
    return known


def _cached(asked: StepQuestion) -> Report:
    """A refresh of a request with a cache. It fits where an engine takes the request, which
    may need `max_context`."""
    workload, engine = asked.workload, asked.engine()
    sharing = None if engine is None else engine.sharing
    longest = on_device = Longest(0, 0.0)
    if engine is not None:
        if not engine.offloaded:
            on_device = _longest_cached(*_without_host(asked, engine), longest)
        longest = _longest_cached(asked, engine, on_device)
    context = asked.context if asked.context is not None else max(1, longest.context)
    taking = None if engine is None else taking_of(asked, engine, context)
    if taking is not None:
        return _reported(asked, context, taking, longest, on_device)
    if sharing is not None:
        needed = room_of(workload, context).least_memory(dataclasses.replace(sharing, context=context))
    else:
        found = asked.plan(context)
        needed = found.room.held + least_room(workload, found.bucket, found.room)
    return _refused(asked, context, needed, "the KV pool", longest, on_device, engine, [])


def _without_host(asked: StepQuestion, engine: Account) -> tuple[StepQuestion, Account]:
    """A question and its engine, which has all layers on the device, without host memory."""
    assert engine.budget is not None  # the engine of a question has one
    budgets = [dataclasses.replace(budget, host=0) for budget in (asked.budget, engine.budget)]
    return dataclasses.replace(asked, budget=budgets[0]), dataclasses.replace(engine, budget=budgets[1])


def _longest_cached(asked: StepQuestion, engine: Account, known: Longest) -> Longest:
    """The longest request that an engine takes, which may need options.

    Arguments:
    - `known`: one that it takes.
    """
    workload, sharing = asked.workload, engine.sharing
    assert sharing is not None  # an engine in a budget has one
    roomiest = asked.tried(offloaded=most_offloaded(workload.config)) if asked.moves_layers else None
    beyond = asked.beyond_pool(engine)
    layered = 0 if beyond is None else longest_layered(beyond, 0)

    def taken(context: int) -> bool:
        if context <= max(known.context, layered) or _options(workload, sharing, context) is not None:
            return True
        return roomiest is not None and could_move(engine, roomiest, room_of(workload, context))

    most = longest_request(taken)
    taking = taking_of(asked, engine, most) if most > known.context else None
    if taking is None:
        return known
    return Longest(most, _reported(asked, most, taking, known, known).time.seconds)


def _reported(
    asked: StepQuestion, context: int, taking: "Taking", longest: Longest, on_device: Longest
) -> Report:
    """The report of a request that fits."""
    found = _beside(asked, context, taking.engine) if taking.layered is None else asked.plan(context)
    return Report(asked, found, None, "fits", longest, on_device, *taking)


class Taking(NamedTuple):
    """An engine that takes a request, what has to be asked for so that `LLM` makes this engine, and how the
    request runs if not in the pool."""

    engine: Account
    options: Options
    layered: LayeredPlan | None = None


def taking_of(asked: StepQuestion, engine: Account, context: int) -> Taking | None:
    """What takes a request of `context` tokens; `None` where only more memory helps.

    The request is in the pool where options make the room for it. Otherwise it runs layer by layer, or a
    context that is asked for moves layers to host memory.
    """
    workload = asked.workload
    options = None if engine.sharing is None else _options(workload, engine.sharing, context)
    if options is not None:
        return Taking(asked.account(**_sizes(options)) if options else engine, options)
    beyond = asked.beyond_pool(engine)
    layered = None if beyond is None else plan_layered(beyond, context, 0)
    if layered is not None:
        return Taking(engine, {}, layered)
    other = moves_for(engine, room_of(workload, context)) if asked.moves_layers else None
    return None if other is None else Taking(*other)


def _beside(asked: StepQuestion, context: int, engine: Account) -> MemoryPlan:
    """The plan of a refresh of so many tokens, with layers in host memory where an engine has some there."""
    if not engine.offloaded:
        return asked.plan(context)
    return plan_offloaded(asked.workload, context, engine)


def room_of(workload: Workload, context: int) -> Room:
    """What a request of so many tokens takes by the workload's cache policy."""
    return Room(context, workload.stored_rows(context))


def _sizes(options: Options) -> dict[str, int]:
    """Options as `account` takes them."""
    return {name: parse_bytes(value) for name, value in options.items()}


def _options(workload: Workload, sharing: Sharing, context: int) -> Options | None:
    """What has to be asked for so that an engine takes a request of `context` tokens; `None` where only more
    memory helps."""
    room = room_of(workload, context)
    options = room.options_within(sharing)
    given = {
        "max_context": sharing.context,
        "kv_pool": sharing.asked_pages,
        "max_num_batched_tokens": sharing.asked_rows,
    }
    return None if options is None or any(given[name] is not None for name in options) else options


def _refused(
    asked: StepQuestion,
    context: int,
    needed: int,
    stop_reason: str,
    longest: Longest,
    on_device: Longest,
    engine: Account | None,
    tiers: Sequence[HostTiers],
) -> Report:
    enough = dataclasses.replace(asked, budget=dataclasses.replace(asked.budget, device=needed))
    available = asked.budget.device
    refusal = MemoryBudgetError(f"a step of {context} tokens", needed, available, longest.context)
    plan = enough.plan(context, tiers)
    return Report(asked, plan, refusal, stop_reason, longest, on_device, engine, {})
