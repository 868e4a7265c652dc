"""Whole layers on each of several cards, for steps whose rows the cards deal out.

A card that has all weights of the layers computes a step for its part of the rows. The cards exchange keys
and values, which each row sees, and no sums. Of a step of many rows that is less than what cards exchange
that have parts of the layers (`jdllm.models.cards`). Source: context parallelism by an all-gather of keys and
values (Grattafiori et al. 2024, section 3.3.2).
"""

import dataclasses

import jax
from jax import lax
from jaxtyping import Array

from jdllm.models.cards import AXIS
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params

WHOLE = "whole"
"""Beside the weights of cards that have whole layers too: these `WholeLayers`."""

LEAST_ROWS = 512
"""Rows of a step from which on rows are dealt out: below, reading whole layers takes longer than sums do."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholeLayers:
    """The layers of a model, the same on each card.

    - `stacks`: of layers, as the weights of one card have them.
    - `config`: the model on one card.
    - `cards`: how many cards deal rows out.
    """

    stacks: Params
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    cards: int = dataclasses.field(metadata={"static": True})

    def takes(self, rows: int, wanted: int | None = None) -> bool:
        """Whether so many rows are dealt out, of which so many are wanted."""
        return rows >= LEAST_ROWS and rows % self.cards == 0 and (wanted or 0) % self.cards == 0

    def dealt(self, x: Array) -> Array:
        """What this card takes of an array with a first axis of rows: as many as each other card."""
        size = len(x) // self.cards
        return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size)
