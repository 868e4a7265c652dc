"""What a device may hold: budgets as users write them, and what the runtime takes for itself."""

import ctypes
import dataclasses
import re
from typing import Any, NamedTuple

import jax

from jdllm.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}

GUARD = 128 << 20
"""Bytes that a plan leaves free: the pool rounds sizes, and has gaps."""

DEFAULT_OVERHEAD = (768 << 20) + GUARD
"""Bytes outside XLA's pool on an H200, rounded up (CUDA context, kernels, library handles), and the guard."""


def parse_bytes(value: int | str, name: str = "memory") -> int:
    """A number of bytes, such as 17179869184, "16GiB" or "24 GB".

    Raises `ConfigError`, naming `name`, for anything else and for what is not positive.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(value))
    if (
        match is None
        or match[2].lower() not in _UNITS
        or (size := int(float(match[1]) * _UNITS[match[2].lower()])) < 1
    ):
        raise ConfigError(f"{name} is {value!r}, expected bytes such as 17179869184 or '24GiB'")
    return size


@dataclasses.dataclass(frozen=True)
class Budget:
    """What may be used.

    - `device`: bytes of the device, the weights and `overhead` included.
    - `overhead`: bytes that the CUDA context and libraries take outside XLA's pool, and a guard band.
    - `host`: bytes of pinned host memory for the tiers.
    """

    device: int
    overhead: int = DEFAULT_OVERHEAD
    host: int = 128 << 30


class MemoryBudgetError(ConfigError):
    """A step that does not fit the budget.

    - `needed_bytes`, `available_bytes`: what the step needs on the device, and what there is.
    - `max_context`: the longest context that fits, in tokens; 0 where not even the weights do.
    """

    def __init__(self, what: str, needed_bytes: int, available_bytes: int, max_context: int):
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.max_context = max_context
        longest = (
            f"the longest context that fits is {max_context} tokens" if max_context else "no context fits"
        )
        gib = 2**30
        super().__init__(
            f"{what} needs {needed_bytes / gib:.2f} GiB on the device, and the budget is"
            f" {available_bytes / gib:.2f} GiB: {longest}"
        )


class DeviceMemory(NamedTuple):
    """Memory of a device as it stands.

    - `limit`: bytes that XLA may allot in all.
    - `overhead`: bytes in use outside XLA's pool: the CUDA context, libraries, other processes.
    """

    limit: int
    overhead: int


def device_memory(device: Any) -> DeviceMemory | None:
    """Measure a device; `None` where it has no memory of its own, as a CPU.

    The overhead is what the driver calls used, less the pool. Where the driver cannot be asked it is
    `DEFAULT_OVERHEAD`.
    """
    if device.platform not in ("gpu", "cuda"):
        return None
    jax.block_until_ready(jax.device_put(0, device) + 1)
    stats = device.memory_stats()
    used = _used_bytes(device.local_hardware_id)
    overhead = DEFAULT_OVERHEAD if used is None else max(0, used - stats.get("pool_bytes", 0))
    return DeviceMemory(stats["bytes_limit"], overhead)


def _used_bytes(index: int) -> int | None:
    """Bytes of a card that are in use by anything, as its driver says."""

    class Memory(ctypes.Structure):
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory = ctypes.c_void_p(), Memory()
    if nvml.nvmlInit_v2():
        return None
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) or nvml.nvmlDeviceGetMemoryInfo(
        handle, ctypes.byref(memory)
    )
    nvml.nvmlShutdown()
    return None if failed else int(memory.used)


def device_budget(device: Any, memory: int | str | None, host_memory: int | str) -> Budget | None:
    """The budget of a device.

    Arguments:
    - `device`: a JAX device.
    - `memory`: bytes of it that may be used, or `None` for all that XLA may allot.
    - `host_memory`: bytes of host memory for the tiers, or "0".

    Returns the budget, or `None` for a CPU without `memory`.
    Raises `ConfigError` for a budget beyond what the device has.
    """
    host = 0 if str(host_memory).strip() == "0" else parse_bytes(host_memory, "host_memory")
    measured = device_memory(device)
    if measured is None:
        return None if memory is None else Budget(parse_bytes(memory), 0, host)
    most = measured.limit + measured.overhead
    given = most if memory is None else parse_bytes(memory)
    if given > most:
        raise ConfigError(
            f"memory is {given} bytes, and XLA may use {most} of this device: ask for less, or raise"
            " XLA_PYTHON_CLIENT_MEM_FRACTION"
        )
    return Budget(given, measured.overhead + GUARD, host)
