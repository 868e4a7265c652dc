"""What a device may hold: budgets as users write them, and what the runtime takes for itself."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jdllm.byte_sizes import DEFAULT_HOST_MEMORY, format_bytes, parse_bytes, parse_host_memory
from jdllm.errors import ConfigError, DoesNotFitError
from jdllm.planning.driver import card_state
from jdllm.planning.host import available, check_pinnable, runtime_limit

CUDA_CONTEXT = 768 << 20
"""Bytes outside XLA's pool on an H200, rounded up: CUDA context, kernels, library handles."""

GUARD = 128 << 20
"""Bytes that a plan leaves free: the pool rounds sizes, and has gaps."""

DEFAULT_OVERHEAD = CUDA_CONTEXT + GUARD

_GPUS = ("gpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Budget:
    """What may be used.

    - `device`: bytes of the device, the weights and `overhead` included.
    - `overhead`: bytes that the CUDA context and libraries take outside XLA's pool, and a guard band.
    - `host`: bytes of pinned host memory for the tiers.
    """

    device: int
    overhead: int = DEFAULT_OVERHEAD
    host: int = parse_bytes(DEFAULT_HOST_MEMORY)

    def beside(self, size: int) -> "StepRoom":
        """The room for a step beside `size` bytes that stay on the device, such as weights."""
        held = self.overhead + size
        return StepRoom(self.device - held, self.host, held)


class StepRoom(NamedTuple):
    """The memory that is left for one step.

    - `device`: bytes of the device; negative where not even the rest fits.
    - `host`: bytes of pinned host memory.
    - `held`: bytes of the device that the step does not have: overhead, weights, a pool. Messages count them.
    """

    device: int
    host: int = 0
    held: int = 0


class MemoryBudgetError(DoesNotFitError):
    """A step that does not fit the budget.

    Arguments:
    - `what`: the step, the subject of the message.
    - `needed_bytes`: the least budget of the device that would do, weights and overhead included.
    - `available_bytes`: the budget.
    - `max_context`: the longest context that fits, in tokens; 0 where not even the weights do.
    - `longest`: which contexts that one is the longest of.
    - `helps`: an option that makes room without more memory, as `max_context=40960`; `None` where none does.
    """

    def __init__(
        self,
        what: str,
        needed_bytes: int,
        available_bytes: int,
        max_context: int,
        longest: str = "context",
        helps: str | None = None,
    ):
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.max_context = max_context
        self._made_of = what, needed_bytes, available_bytes, max_context, longest, helps
        fitting = f"the longest {longest} that fits is {max_context} tokens"
        super().__init__(
            f"{what} needs at least {format_bytes(needed_bytes, math.ceil)} on the device, weights included,"
            f" and the budget is {format_bytes(available_bytes, math.floor)}:"
            f" {fitting if max_context else f'no {longest} fits'}"
            f"{f'; set {helps}, so that more layers are in host memory' if helps else ''}"
        )

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), self._made_of


class DeviceMemory(NamedTuple):
    """Memory of a device as it stands.

    - `limit`: bytes that XLA may allot in all.
    - `overhead`: bytes in use outside XLA's pool: the CUDA context, libraries, other processes.
    - `arrays`: bytes of this process's arrays.
    - `gaps`: bytes of XLA's pool between arrays: free, but too small for large arrays.
    """

    limit: int
    overhead: int
    arrays: int
    gaps: int


def device_memory(device: Any) -> DeviceMemory | None:
    """Measure a device; `None` where it has no memory of its own, as a CPU.

    The overhead is what the driver calls used, less the pool. Where the driver cannot be asked it is
    `DEFAULT_OVERHEAD`.
    """
    if device.platform not in _GPUS:
        return None
    jax.block_until_ready(jax.device_put(0, device) + 1)
    stats = device.memory_stats()
    state = card_state(device.local_hardware_id)
    overhead = DEFAULT_OVERHEAD if state is None else max(0, state.used - stats.get("pool_bytes", 0))
    return DeviceMemory(stats["bytes_limit"], overhead, stats["bytes_in_use"], _gaps(stats))


def pool_gaps(device: Any) -> int:
    """Bytes of XLA's pool between arrays: free, but too small for large arrays; 0 for a CPU."""
    return _gaps(device.memory_stats()) if device.platform in _GPUS else 0


def _gaps(stats: Mapping[str, int]) -> int:
    pool = stats.get("pool_bytes", 0)
    return max(0, pool - stats["bytes_in_use"] - stats.get("largest_free_block_bytes", pool))


def usable_host_memory(device: Any, host_memory: int | str) -> int:
    """Bytes of host memory that may be pinned for a device, asked before anything is pinned.

    `host_memory` is a number of bytes or a text with a unit. If it is the default, the answer is at most as
    much as the machine has left.

    Raises `ConfigError` for more than can be pinned.
    """
    host = parse_host_memory(host_memory)
    if device.platform not in _GPUS:
        return host
    if host_memory == DEFAULT_HOST_MEMORY:
        return min(host, runtime_limit(), available() or host)
    check_pinnable(host)
    return host


def device_budget(
    device: Any, memory: int | str | None, host_memory: int | str, *, held: int | None = None
) -> Budget | None:
    """The budget of a device.

    Arguments:
    - `device`: a JAX device.
    - `memory`: bytes of it that may be used, or `None` for all that XLA may allot in one piece beside the
      arrays that are there.
    - `host_memory`: bytes of host memory for the tiers, or "0".
    - `held`: bytes of arrays that the budget is for, such as weights; other arrays of the process take from
      what there is. `None` leaves arrays out of account.

    Returns the budget, or `None` for a CPU without `memory`.
    Raises `ConfigError` for a budget beyond what the device has left.
    """
    host = parse_host_memory(host_memory)
    measured = device_memory(device)
    if measured is None:
        return None if memory is None else Budget(parse_bytes(memory), 0, host)
    others = 0 if held is None else max(0, measured.arrays - held)
    most = measured.limit + measured.overhead - others
    given = most - measured.gaps if memory is None else parse_bytes(memory)
    if given > most:
        taken = f" beside {others} bytes of other arrays in this process" if others else ""
        raise ConfigError(
            f"memory is {given} bytes, and XLA may use {most} of this device{taken}: ask for less, or raise"
            " XLA_PYTHON_CLIENT_MEM_FRACTION"
        )
    return Budget(given, measured.overhead + GUARD, host)
