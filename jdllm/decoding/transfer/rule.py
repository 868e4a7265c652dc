"""What a transfer rule says of itself."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jdllm.decoding.option import Option

if TYPE_CHECKING:
    from jdllm.decoding.schedule import StepTable
    from jdllm.decoding.transfer.ranking import Accept, AcceptWithState

Field = Literal["transfer", "alg"]


class Measure(enum.IntEnum):
    """How sure the sampler is of a row's token; higher commits first.

    - `PROBABILITY`: the model's probability of the token.
    - `RANDOM`: a uniform draw.
    - `MARGIN`: the largest probability less the second largest.
    - `ENTROPY`: the negative entropy, sum of p ln(p + 1e-10), in nats.
    - `POSITION`: the negative position, so that the first masked row commits first.
    """

    PROBABILITY = 0
    RANDOM = 1
    MARGIN = 2
    ENTROPY = 3
    POSITION = 4


class StateArray(NamedTuple):
    """An array that a rule carries from step to step, through the end of the block.

    - `name`: by which the rule finds it.
    - `dtype`: a NumPy type of 32 bits or bool, by name.
    - `initial`: every entry when a block is entered.
    - `per_row`: an entry for each masked position, where it otherwise has one for each segment.
    """

    name: str
    dtype: str
    initial: float
    per_row: bool = False


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The part of a rule that runs on the device; several rules may share one.

    - `name`: unique among those that are registered.
    - `accept`: returns the rows that commit, from the ranked rows. With a `state` the function also takes the
      state before the step, and returns the state after the step (`AcceptWithState`).
    - `takes_long`: the function runs row by row. Programs without long rules leave it out; other programs run
      it where a segment has it.
    - `state`: what the rule carries from step to step.
    """

    name: str
    accept: "Accept | AcceptWithState"
    takes_long: bool = False
    state: tuple[StateArray, ...] = ()

    def __repr__(self) -> str:
        return f"Acceptance({self.name})"


Table = Callable[[int, int, Mapping[str, Any]], "StepTable"]
"""(masks of the block, its steps, options by name) -> what each step may commit."""


@dataclasses.dataclass(frozen=True)
class TransferRule:
    """A transfer rule: a value of `transfer` or `alg` in `SamplingParams`.

    - `field`, `name`: the parameter and its value that choose the rule. Rules of `alg` belong to Dream's
      sampler: they measure confidences after temperature and filters.
    - `help`: which tokens a step commits, in words.
    - `acceptance`: what runs on the device; `None` where a verifier decides.
    - `measure`: the measure of a row that the rule reads; it ranks the rows unless their order is drawn.
    - `options`: the parameters that have an effect with this rule.
    - `table`: what each step may commit; `None` where confidences alone decide, so that a block takes as many
      steps as it needs, and each may commit all of the block.
    - `quota`: how the quota comes from the table: as it stands, as a share of the rows that are still masked,
      or in addition to these rows.
    - `published`: whether ids that the tokenizer does not define may be chosen unless a request bans them.
    - `cached`: the rule that stands in for this one where a request has a cache.
    """

    field: Field
    name: str
    help: str
    acceptance: Acceptance | None
    measure: Measure = Measure.PROBABILITY
    options: tuple[Option, ...] = ()
    table: Table | None = None
    quota: Literal["as it stands", "share of masked", "plus masked"] = "as it stands"
    published: bool = False
    cached: "TransferRule | None" = None

    @property
    def takes_steps(self) -> bool:
        """Whether a request says how many steps it takes."""
        return self.table is not None and self.quota != "plus masked"
