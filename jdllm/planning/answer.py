"""Whether a context fits, in what step, how long the longest is, and which engine serves it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jdllm.byte_sizes import parse_bytes
from jdllm.execution.offload.placement import most_offloaded
from jdllm.execution.offload.tiers import HostTiers
from jdllm.planning.account import Account
from jdllm.planning.asking import Moved, could_move, moved_engine, moves_for
from jdllm.planning.budget import Budget, MemoryBudgetError
from jdllm.planning.card import Card
from jdllm.planning.layered import LayeredPlan, longest_layered, plan_layered
from jdllm.planning.offloading import holds_usual, longest_offloaded, plan_offloaded
from jdllm.planning.plan import (
    MemoryPlan,
    Workload,
    least_room,
    max_context,
    row_ladder,
    rungs,
)
from jdllm.planning.question import Longest, StepQuestion
from jdllm.planning.room import Options, Room, in_option, longest_request
from jdllm.planning.search import largest
from jdllm.planning.step_time import StepTime, layered_time, step_time


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
    if tiers and (engine is None or not engine.offloaded or _with_all_layers(asked, engine) is not None):
        longest = asked.timed(max_context(workload, budget, host_tiers=tiers), tiers)
    longest = _longest_moving(asked, engine, longest)
    context = asked.context if asked.context is not None else max(1, longest.context)
    plans = list[MemoryPlan]()
    for found, taking, options in _full_steps(asked, engine, context, tiers):
        if found.fits:
            return Report(asked, found, None, "fits", longest, on_device, taking, options)
        plans.append(found)
        engine = taking
    room = asked.plan(context, tiers).room
    needed = room.held + least_room(workload, plans[-1].bucket, room, tiers)
    enough_host = plans[-1].host_bytes <= budget.host
    stop_reason = plans[-1].activation.stop_reason if enough_host else "host memory is too small"
    return _refused(asked, context, needed, stop_reason, longest, on_device, engine, tiers)


def _full_steps(
    asked: StepQuestion, engine: Account | None, context: int, tiers: Sequence[HostTiers]
) -> Iterator[tuple[MemoryPlan, Account | None, Options]]:
    """Plans of a full step, each with an engine that runs it if it fits, and what `LLM` is asked for then."""
    workload = asked.workload
    moved = engine is not None and engine.offloaded > 0
    if engine is not None and moved:
        whole = _with_all_layers(asked, engine)
        yield plan_offloaded(workload, context, engine), engine, {}
    else:
        whole = None
        yield asked.plan(context, tiers), engine, {}
    beyond = asked.tried(max_context=context)
    if beyond is not None and beyond.offloaded:
        same = engine is not None and engine.offloaded == beyond.offloaded
        yield plan_offloaded(workload, context, beyond), beyond, {} if same else {"max_context": context}
    if whole is not None:
        yield asked.plan(context, tiers), whole.engine, whole.options


def _with_all_layers(asked: StepQuestion, engine: Account) -> Moved | None:
    """What keeps all layers on the device where the default engine has some in host memory, so that other
    arrays may go there: the least pool. `None` where nothing does."""
    pool = 2 * engine.page_bytes
    other = asked.tried(kv_pool=pool) if asked.moves_layers else None
    return None if other is None or other.offloaded else Moved(other, {"kv_pool": in_option(pool)})


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
        alone = without_host(asked, engine)
        if alone is not None:
            on_device = _longest_cached(*alone, longest)
        longest = _longest_cached(asked, engine, longest if engine.offloaded else on_device)
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


def without_host(asked: StepQuestion, engine: Account) -> tuple[StepQuestion, Account] | None:
    """A question and its engine without host memory; `None` where there is none then."""
    assert engine.budget is not None  # the engine of a question has one
    alone = dataclasses.replace(asked, budget=dataclasses.replace(asked.budget, host=0))
    if engine.offloaded:
        other = alone.tried()
        return None if other is None else (alone, other)
    return alone, dataclasses.replace(engine, budget=dataclasses.replace(engine.budget, host=0))


def _longest_cached(asked: StepQuestion, engine: Account, known: Longest) -> Longest:
    """The longest request that an engine takes, which may need options.

    Arguments:
    - `known`: one that it takes.
    """
    workload = asked.workload
    roomiest = asked.tried(offloaded=most_offloaded(workload.config)) if asked.moves_layers else None
    tight = roomiest is not None and not holds_usual(asked.tried(offloaded=0, max_num_batched_tokens=None))
    beyond = asked.beyond_pool(engine)
    layered = 0 if beyond is None else longest_layered(beyond, 0)

    def taken(context: int) -> bool:
        if context <= max(known.context, layered) or _options(workload, engine, context) is not None:
            return True
        room = room_of(workload, context)
        return roomiest is not None and could_move(engine, roomiest, room, tight=tight)

    most = max(longest_request(taken), known.context)
    if roomiest is not None:
        most = _longest_layered_moving(asked, engine, roomiest, most)
    taking = taking_of(asked, engine, most) if most > known.context else None
    if taking is None:
        return known
    return Longest(most, _reported(asked, most, taking, known, known).time.seconds)


def _longest_layered_moving(asked: StepQuestion, engine: Account, roomiest: Account, known: int) -> int:
    """The longest request that runs layer by layer in an engine with more layers in host memory, or `known`
    where that is no longer."""
    beyond = asked.beyond_pool(roomiest)
    most = 0 if beyond is None or engine.offloaded == roomiest.offloaded else longest_layered(beyond, 0)
    longer = [rows for rows in row_ladder() if known < rows <= most]
    return largest(lambda rows: taking_of(asked, engine, rows) is not None, longer) or known


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
    context that is asked for moves layers to host memory, and it is in the pool or runs layer by layer there.
    """
    workload = asked.workload
    options = _options(workload, engine, context)
    if options is not None:
        return Taking(asked.account(**_sizes(options)) if options else engine, options)
    beyond = asked.beyond_pool(engine)
    layered = None if beyond is None else plan_layered(beyond, context, 0)
    if layered is not None:
        return Taking(engine, {}, layered)
    if not asked.moves_layers:
        return None
    if (other := moves_for(engine, room_of(workload, context))) is not None:
        return Taking(*other)
    moved = None if beyond is None else moved_engine(engine, context)
    other_beyond = None if moved is None else asked.beyond_pool(moved)
    layered = None if other_beyond is None else plan_layered(other_beyond, context, 0)
    return None if moved is None or layered is None else Taking(moved, {"max_context": context}, layered)


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


def _options(workload: Workload, engine: Account, context: int) -> Options | None:
    """What has to be asked for so that an engine takes a request of `context` tokens; `None` where only more
    memory helps."""
    sharing = engine.sharing
    assert sharing is not None  # an engine in a budget has one
    options = room_of(workload, context).options_within(sharing)
    given = {
        "max_context": sharing.context,
        "kv_pool": sharing.asked_pages,
        "max_num_batched_tokens": sharing.asked_rows,
    }
    if options is None or any(given[name] is not None for name in options):
        return None
    # An engine that is asked for smaller steps may have other layers in host memory.
    return None if engine.offloaded and "max_num_batched_tokens" in options else options


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
