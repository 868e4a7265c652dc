"""What a plan is asked: a step, a card, a budget and the sizes of an engine."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jdllm.errors import ConfigError
from jdllm.execution.offload.tiers import HostTiers
from jdllm.planning.account import Account, make_account
from jdllm.planning.budget import Budget, MemoryBudgetError
from jdllm.planning.card import Card
from jdllm.planning.layered import CACHES, Layered, retention_of
from jdllm.planning.offloading import account_with_offloading
from jdllm.planning.plan import MemoryPlan, Workload, plan_memory
from jdllm.planning.step_time import step_time


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
        workload = self.workload
        if workload.cache_policy not in CACHES:
            return None
        retention = retention_of(workload.sampling)
        return Layered.of_account(workload.config, workload.dtype, engine, retention)
