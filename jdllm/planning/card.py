"""Cards to plan for: the one that is there, asked without taking any of its memory, and described ones."""

import os
from typing import NamedTuple

import jax

from jdllm.planning.aot import capability_of, memory_of
from jdllm.planning.budget import CUDA_CONTEXT
from jdllm.planning.descriptions import described_targets
from jdllm.planning.driver import card_state

DEFAULT_TARGET = "h200"
_XLA_FRACTION = 0.75


class Card(NamedTuple):
    """A card.

    - `name`: as its driver calls it.
    - `target`: the description that it is planned by, as `jdllm.planning.aot.target_sharding` names it.
    - `memory`: bytes in all.
    - `described`: whether that description is of a card of its compute capability.
    """

    name: str
    target: str
    memory: int
    described: bool = True

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

    It is planned as `target_for` says, with the memory that it has itself.
    """
    if platforms() == "cpu":
        return None
    state = card_state(0)
    if state is None:
        return None
    target = target_for(state.capability, state.memory)
    return Card(state.name, target, state.memory, capability_of(target) == state.capability)


def platforms() -> str | None:
    """What `JAX_PLATFORMS` says."""
    return jax.config.jax_platforms


def target_for(capability: tuple[int, int], memory: int) -> str:
    """The description of a card of this compute capability; of several, the card with the nearest memory.

    Where none is, `DEFAULT_TARGET`.
    """
    alike = [target for target in described_targets() if capability_of(target) == capability]
    return min(alike, key=lambda target: abs(memory_of(target) - memory), default=DEFAULT_TARGET)
