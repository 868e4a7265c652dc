"""The transfer rules once more: one segment at a time, plain Python, float64."""

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Rule(enum.Enum):
    """What rules do on the device, by name."""

    QUOTA = "quota"
    THRESHOLD = "threshold"
    FALLING_THRESHOLD = "falling_threshold"
    FACTOR = "factor"
    ENTROPY_BOUND = "entropy_bound"
    ORIGIN = "origin"
    DEFERRED = "deferred"
    DYNAMIC = "dynamic"


class Asked(NamedTuple):
    """Parameters of all rules for one step of one segment; `masks` are those of the block."""

    quota: int = 0
    fraction: float = 0.0
    threshold: float = 0.9
    strict: bool = False
    factor: float = 1.0
    open_end: bool = True
    entropy_bound: float = 0.1
    fall: float = 0.3
    masks: int = 0


def committed(
    rule: Rule, confidence: Sequence[float], order: Sequence[float], draw: Sequence[float], asked: Asked
) -> list[int]:
    """Which of a segment's masked rows commit."""
    ranked = sorted(range(len(order)), key=lambda row: (-order[row], row))
    if rule is Rule.QUOTA:
        return ranked[: asked.quota]
    if rule is Rule.ORIGIN:
        return [row for row in ranked if draw[row] < asked.fraction]
    if rule is Rule.FACTOR:
        return ranked[: factor_count([confidence[row] for row in ranked], asked.factor, asked.open_end)]
    if rule is Rule.ENTROPY_BOUND:
        return ranked[: bounded_count([-confidence[row] for row in ranked], asked.entropy_bound)]
    if rule is Rule.DYNAMIC:
        above = [row for row in ranked if confidence[row] > asked.threshold]
        return above if len(above) >= asked.quota else ranked[: asked.quota]
    if rule is Rule.DEFERRED:
        ranked = ranked[: asked.quota]
    if rule is Rule.FALLING_THRESHOLD:
        asked = asked._replace(threshold=fallen(len(ranked), asked))
    return ranked[:1] + [row for row in ranked[1:] if reaches(confidence[row], asked)]


def reaches(confidence: float, asked: Asked) -> bool:
    return confidence > asked.threshold if asked.strict else confidence >= asked.threshold


def fallen(left: int, asked: Asked) -> float:
    """The threshold where so many rows of the block are masked."""
    filled = max(asked.masks - left, 0)
    return asked.threshold * (1 - asked.fall * filled / max(asked.masks, 1))


def factor_count(falling: list[float], factor: float, open_end: bool) -> int:
    """The published loop: index of the first failure; all where it ends or (open) fails at the last index."""
    for k, confidence in enumerate(falling):
        if k > 0 and confidence < 1 - factor / (k + 2):
            return k + 1 if open_end and k == len(falling) - 1 else k
    return len(falling)


def bounded_count(entropies: list[float], bound: float) -> int:
    """The largest n of which the first n - 1 entropies sum to at most the bound; at least 1."""
    count = 0
    while count < len(entropies) and (count == 0 or sum(entropies[:count]) <= bound):
        count += 1
    return count
