"""Cards to plan for: the one that is there, asked without taking any of its memory, and described ones."""

import ctypes
import os
from typing import NamedTuple

import jax

from jdllm.planning.aot import capability_of, memory_of
from jdllm.planning.budget import CUDA_CONTEXT

DEFAULT_TARGET = "h200"
_XLA_FRACTION = 0.75
_MAJOR, _MINOR = 75, 76
"""The driver's numbers of the attributes that make a compute capability."""


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
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    name, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetName(name, len(name), device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    if failed:
        return None
    return Card(name.value.decode(), target_for((major.value, minor.value)), size.value)


def _platforms() -> str | None:
    """What `JAX_PLATFORMS` says."""
    return jax.config.jax_platforms


def target_for(capability: tuple[int, int]) -> str:
    """The description of a card of this compute capability, `DEFAULT_TARGET` where none is."""
    known = {capability_of(target): target for target in ("a100", "l40s", "h200")}
    return known.get(capability, DEFAULT_TARGET)
