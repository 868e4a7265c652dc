"""The fixed schedule: the surest `quota` rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jdllm.decoding.transfer.rule import Acceptance, Measure, TransferRule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from jdllm.decoding.schedule import StepTable
    from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: "Ranked", params: "RuleParams", segments: int) -> "Bool[Array, ' rows']":
    """Rows of the first `quota` ranks. LLaDA's schedule, Dream's timetable, and margin and random orders."""
    return ranked.rank < params.quota


def linear(masks: int, steps: int, options: Mapping[str, Any]) -> "StepTable":
    """LLaDA's linear schedule."""
    # What declares parameters is read without NumPy.
    from jdllm.decoding.schedule import quotas, transfer_schedule

    return quotas(transfer_schedule(masks, steps))


QUOTA = Acceptance("quota", accept)

SCHEDULE = TransferRule(
    "transfer", "schedule", "LLaDA's quota of the surest ones", QUOTA, table=linear, published=True
)
MARGIN = TransferRule(
    "transfer",
    "margin",
    "the schedule, ordered by the margin of the best over the second-best probability",
    QUOTA,
    Measure.MARGIN,
    table=linear,
)
SEQUENTIAL = TransferRule(
    "transfer",
    "sequential",
    "the schedule, from left to right (SDAR)",
    QUOTA,
    Measure.POSITION,
    table=linear,
    published=True,
)
