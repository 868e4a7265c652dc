"""Cache policies: what is refreshed when, what a refresh may store, and which rows the other steps forward.

A refresh evaluates the whole sequence; the steps that follow evaluate only rows that were not among the
refresh's candidates, against the stored keys and values. All policies are approximate but "none": what is
stored is as old as the refresh.
"""

import abc
import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from jdllm.decoding.sampling import SamplingParams


class Phase(enum.IntEnum):
    """What a denoising step evaluates.

    - `FULL`: the whole sequence; nothing is stored.
    - `REFRESH`: the whole sequence, and its candidates' keys and values are stored.
    - `REUSE`: the rows that were not candidates, against what is stored.
    """

    FULL = 0
    REFRESH = 1
    REUSE = 2


class View(NamedTuple):
    """A sequence at a refresh.

    - `length`: its positions.
    - `start`, `stop`: the current block, with the row before it where the model predicts tokens from there.
    - `masked`: bool `[length]`, positions that are masked before the step.
    - `shifted`: whether a masked position's prediction comes from the row before it.
    """

    length: int
    start: int
    stop: int
    masked: np.ndarray
    shifted: bool


@dataclasses.dataclass(frozen=True)
class CachePolicy(abc.ABC):
    """One way to cache.

    - `delay`, `interval`: defaults of `refresh_delay` and `refresh_interval`; an interval of 0 is none.
    - `scored`: whether only the best candidates are kept, by their attention scores.
    - `per_head`: whether each key-value head keeps its own.
    """

    delay: int = 0
    interval: int = 0
    scored: bool = False
    per_head: bool = False

    @abc.abstractmethod
    def candidates(self, view: View) -> np.ndarray:
        """Positions that a refresh may store, rising; all others are forwarded until the next one."""


@dataclasses.dataclass(frozen=True)
class _Prefix(CachePolicy):
    """Everything to the left of the block (Fast-dLLM v1, prefix cache)."""

    def candidates(self, view: View) -> np.ndarray:
        return np.arange(view.start)


@dataclasses.dataclass(frozen=True)
class _Dual(CachePolicy):
    """Everything outside the block (Fast-dLLM v1, dual cache)."""

    def candidates(self, view: View) -> np.ndarray:
        return np.concatenate([np.arange(view.start), np.arange(view.stop, view.length)])


@dataclasses.dataclass(frozen=True)
class _Selective(CachePolicy):
    """Everything decoded (dKV-Cache, decode variant): the prompt, and what was committed before the refresh.

    A token is thus evaluated once as itself before it is stored. Later tokens are evaluated until the next
    refresh, where dKV-Cache stores them one step after they were committed.
    """

    delay: int = 1
    interval: int = 8

    def candidates(self, view: View) -> np.ndarray:
        forwarded = view.masked.copy()
        if view.shifted:
            forwarded[:-1] |= view.masked[1:]
        return np.flatnonzero(~forwarded)


@dataclasses.dataclass(frozen=True)
class _Sparse(_Dual):
    """The rows outside the block that its queries attend to most, the same for all heads (Sparse-dLLM)."""

    delay: int = 1
    scored: bool = True


@dataclasses.dataclass(frozen=True)
class _HeadSparse(_Sparse):
    """The same for each key-value head alone (dLLM-Serve)."""

    per_head: bool = True


POLICIES: dict[str, CachePolicy] = {
    "prefix": _Prefix(),
    "dual": _Dual(),
    "selective": _Selective(),
    "sparse": _Sparse(),
    "head_sparse": _HeadSparse(),
}


def policy_of(sampling: SamplingParams) -> CachePolicy | None:
    """The cache policy of a request; `None` without one."""
    return POLICIES.get(sampling.cache)


def phase(sampling: SamplingParams, block_step: int) -> Phase:
    """What the step `block_step` of a block, counted from 0, evaluates."""
    policy = policy_of(sampling)
    if policy is None:
        return Phase.FULL
    delay = policy.delay if sampling.refresh_delay is None else sampling.refresh_delay
    interval = policy.interval if sampling.refresh_interval is None else sampling.refresh_interval
    if block_step < delay:
        return Phase.FULL
    again = interval > 0 and block_step > delay and block_step % interval == 0
    return Phase.REFRESH if block_step == delay or again else Phase.REUSE


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
