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

from jdllm.byte_sizes import format_bytes
from jdllm.errors import ConfigError
from jdllm.models.cards import AXIS
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, layer_bytes

WHOLE = "whole"
"""Beside the weights of cards that have whole layers too: these `WholeLayers`."""

LEAST_ROWS = 512
"""Rows of a step from which on rows are dealt out: below, reading whole layers takes longer than sums do."""

_PARTS = 4
"""Whole layers are kept by default where memory is so many times as large."""


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

    def takes(self, rows: int, wanted: int = 0) -> bool:
        """Whether so many rows are dealt out, of which so many are wanted; 0 for all."""
        return rows >= LEAST_ROWS and rows % self.cards == 0 and wanted % self.cards == 0

    def dealt(self, x: Array) -> Array:
        """What this card takes of an array with a first axis of rows: as many as each other card."""
        size = len(x) // self.cards
        return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size)


def whole_layers_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all layers of a model."""
    whole = dataclasses.replace(config, cards=1)
    return sum(layer_bytes(whole, dtype, layer) for layer in range(config.num_layers))


def keeps_whole_layers(asked: bool | None, config: ModelConfig, dtype: str, memory: int | None) -> bool:
    """Whether each card of a model has whole layers.

    Arguments:
    - `asked`: the option; `None` for those of a model that sees all tokens, where a quarter of the memory
      holds them.
    - `config`, `dtype`: the model, and the type of its weights.
    - `memory`: bytes of each card that may be used; `None` for a CPU without a limit.

    Raises `ConfigError` where they are asked for and have no room, or there is one card.
    """
    if asked and config.cards == 1:
        raise ConfigError("whole_layers is for several cards, and devices is 1")
    if asked is False or config.cards == 1:
        return False
    size = whole_layers_bytes(config, dtype)
    if asked is None:
        return memory is not None and not config.in_parts and _PARTS * size <= memory
    if memory is not None and size > memory:
        raise ConfigError(
            f"whole_layers takes {format_bytes(size)} on each card, of which {format_bytes(memory)} may be"
            " used: leave it out, or raise memory"
        )
    return True
