"""Fast-dLLM's rule for Dream: a quota, from which unsure rows are put off."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jdllm.decoding.transfer import threshold
from jdllm.decoding.transfer.rule import Acceptance, TransferRule
from jdllm.decoding.transfer.timetable import ALG_TEMP

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from jdllm.decoding.schedule import StepTable
    from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: "Ranked", params: "RuleParams", segments: int) -> "Bool[Array, ' rows']":
    """Of the first `quota` ranks those that reach the threshold, and the first in any case.

    Deferred tokens return in the next step's quota (NVlabs/Fast-dLLM v1, Dream, `confidence_threshold`).
    """
    return (ranked.rank < params.quota) & threshold.reaches(ranked, params)


def deferring(masks: int, steps: int, options: Mapping[str, Any]) -> "StepTable":
    """The rule's quota, relative to the rows that are still masked."""
    # What declares parameters is read without NumPy.
    from jdllm.decoding.schedule import deferred_quota, quotas

    return quotas(deferred_quota(masks, steps))


ACCEPTANCE = Acceptance("deferred", accept)

# In blocks, which Dream's sampler has with a cache only, nothing is put off.
_IN_BLOCKS = TransferRule(
    "alg",
    "confidence_threshold",
    "all at least as sure as `threshold`, and the surest",
    threshold.ACCEPTANCE,
    options=(*threshold.OPTIONS, ALG_TEMP),
    published=True,
)
RULE = dataclasses.replace(
    _IN_BLOCKS,
    help="Fast-dLLM's rule for Dream: gen_length / steps tokens a step, those below `threshold` put off",
    acceptance=ACCEPTANCE,
    table=deferring,
    quota="plus masked",
    cached=_IN_BLOCKS,
)
