"""What a cache policy says of itself."""

import abc
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field

from jdllm.decoding.kinds import LONGEST, Step, odd
from jdllm.decoding.option import Option

if TYPE_CHECKING:
    import numpy as np

RETENTION = Option(
    "retention",
    Annotated[float, Field(gt=0, le=1)],
    0.5,
    "share of the rows that the sparse policies keep, at least one row.",
)
POOL_KERNEL = Option(
    "pool_kernel",
    Annotated[int, Field(ge=1, le=LONGEST), AfterValidator(odd)],
    3,
    "odd width of the max pool over the scores of these rows, 1 for none.",
    offered=False,
)
REFRESH_DELAY = Option(
    "refresh_delay",
    Step,
    None,
    "step of a block, counted from 0, that refreshes; the steps before it evaluate everything.",
    shown_default="1 for sparse, head_sparse and selective, else 0",
)
REFRESH_INTERVAL = Option(
    "refresh_interval",
    Step,
    None,
    "further refreshes, at the multiples of this number of steps.",
    shown_default="8 for selective, else 0, which is never",
    offered=False,
)
OFFICIAL_FORCING = Option(
    "official_forcing",
    bool,
    False,
    "with Dream the published cached samplers commit the first token of every block in its first step,"
    " whatever its confidence, and the steps that reuse do not evaluate the row before the block (quirk Q30)."
    " False evaluates that row.",
    offered=False,
)


class View(NamedTuple):
    """A sequence at a refresh.

    - `length`: its positions.
    - `start`, `stop`: the current block, with the row before it where the model predicts tokens from there.
    - `masked`: bool `[length]`, positions that are masked before the step.
    - `shifted`: whether a masked position's prediction comes from the row before it.
    - `options`: the values of the policy's own options by name.
    """

    length: int
    start: int
    stop: int
    masked: "np.ndarray"
    shifted: bool
    options: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class CachePolicy(abc.ABC):
    """One way to cache: a value of `cache` in `SamplingParams`.

    - `name`: the value.
    - `help`: which rows a refresh stores, in words.
    - `delay`, `interval`: defaults of `refresh_delay` and `refresh_interval`; an interval of 0 is none.
    - `scored`: whether only the best candidates are kept, by their attention scores.
    - `per_head`: whether each key-value head keeps its own.
    - `once`: whether a request refreshes in its first step only. The candidates are then its first rows, and
      see each other only in this step. So stored keys and values do not depend on any other row.
    - `own`: parameters beside those that all policies have.
    """

    name: str
    help: str
    delay: int = 0
    interval: int = 0
    scored: bool = False
    per_head: bool = False
    once: bool = False
    own: tuple[Option, ...] = ()

    @property
    def options(self) -> tuple[Option, ...]:
        """The parameters that have an effect with this policy."""
        scored = (RETENTION, POOL_KERNEL) if self.scored else ()
        refreshes = () if self.once else (REFRESH_DELAY, REFRESH_INTERVAL, OFFICIAL_FORCING)
        return (*scored, *refreshes, *self.own)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The defaults of options that each policy has of its own."""
        return {REFRESH_DELAY.name: self.delay, REFRESH_INTERVAL.name: self.interval}

    @abc.abstractmethod
    def candidates(self, view: View) -> "np.ndarray":
        """Positions that a refresh may store, rising; all others are forwarded until the next one."""
