"""Cards to plan for: the one that is there, asked without taking any of its memory, and described ones."""

import os
from typing import NamedTuple

import jax

from jdllm.planning.aot import capability_of, memory_of
from jdllm.planning.budget import CUDA_CONTEXT
from jdllm.planning.driver import card_state

DEFAULT_TARGET = "h200"
_XLA_FRACTION = 0.75


class Card(NamedTuple):
    """A card.

    - `name`: as its driver calls it.
    - `target`: the description that it is planned by, as `jdllm.planning.aot.target_sharding` names it.
    - `memory`: bytes in all.
    """

    name: str
    target: str
    memory: int

    @property
    def default_memory(self) -> int:
        """What `LLM` takes for its budget without `memory`: all that XLA may allot, and the CUDA context."""
        fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or _XLA_FRACTION
        return int(float(fraction) * self.memory) + CUDA_CONTEXT


def described_card(target: str) -> Card:
    """The card of a description; raises `ConfigError` for a name that has none."""
    return Card(target, target, memory_of(target))


def visible_card() -> Card | None:
    """The first card that CUDA shows to this process, or `None` where there is none or JAX may not use it.

    A card of a compute capability that no description has is planned as `DEFAULT_TARGET`.
    """
    if _platforms() == "cpu":
        return None
    state = card_state(0)
    return None if state is None else Card(state.name, target_for(state.capability), state.memory)


def _platforms() -> str | None:
    """What `JAX_PLATFORMS` says."""
    return jax.config.jax_platforms


def target_for(capability: tuple[int, int]) -> str:
    """The description of a card of this compute capability, `DEFAULT_TARGET` where none is."""
    known = {capability_of(target): target for target in ("a100", "l40s", "h200")}
    return known.get(capability, DEFAULT_TARGET)
