"""Cache policies: what is refreshed when, what a refresh may store, and which rows the other steps forward.

A refresh evaluates the whole sequence; the steps that follow evaluate only rows that were not among the
refresh's candidates, against the stored keys and values. All policies are approximate but "none":
stored keys and values are as old as the refresh.
"""

import enum

from jdllm.decoding.caches.policy import CachePolicy
from jdllm.decoding.registry import POLICIES
from jdllm.decoding.sampling import SamplingParams


class Phase(enum.IntEnum):
    """What a denoising step evaluates.

    - `FULL`: the whole sequence; nothing is stored.
    - `REFRESH`: the whole sequence, and its candidates' keys and values are stored.
    - `REUSE`: the rows that were not candidates, against stored keys and values.
    """

    FULL = 0
    REFRESH = 1
    REUSE = 2


def policy_of(sampling: SamplingParams) -> CachePolicy | None:
    """The cache policy of a request; `None` without one."""
    return POLICIES.get(sampling.cache)


def phase(sampling: SamplingParams, block_step: int, block: int = 0) -> Phase:
    """What the step `block_step` of a block evaluates; steps and blocks are counted from 0."""
    policy = policy_of(sampling)
    if policy is None:
        return Phase.FULL
    if policy.once:
        return Phase.REFRESH if block_step == block == 0 else Phase.REUSE
    delay = policy.delay if sampling.refresh_delay is None else sampling.refresh_delay
    interval = policy.interval if sampling.refresh_interval is None else sampling.refresh_interval
    if block_step < delay:
        return Phase.FULL
    again = interval > 0 and block_step > delay and block_step % interval == 0
    return Phase.REFRESH if block_step == delay or again else Phase.REUSE


def steps_to_refresh(sampling: SamplingParams, block_step: int, block: int = 0) -> int | None:
    """Steps from the step `block_step` of a block on, itself included, until the first that is none of
    `Phase.REUSE`.

    Returns `None` where the block has no such step.
    """
    if phase(sampling, block_step, block) is not Phase.REUSE:
        return 0
    policy = policy_of(sampling)
    assert policy is not None  # whoever reuses has one
    interval = policy.interval if sampling.refresh_interval is None else sampling.refresh_interval
    return interval - block_step % interval if interval else None


def kept(sampling: SamplingParams, candidates: int) -> int:
    """How many of a refresh's candidates are stored; of a whole sequence, at most so many ever are.

    A share of any candidates is at least one of them.
    """
    policy = policy_of(sampling)
    if policy is None:
        return 0
    if not policy.scored:
        return candidates
    return min(candidates, max(1, int(candidates * sampling.effective("retention"))))
