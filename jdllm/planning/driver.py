"""What the drivers say of a card. Nothing is allotted on it, and no CUDA context made.

CUDA numbers the cards that a process may use, parts of a card (MIG) among them, as `CUDA_VISIBLE_DEVICES` and
`CUDA_DEVICE_ORDER` say. NVML numbers all cards of the machine. Both know the same unique ids.
"""

import contextlib
import ctypes
import uuid
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple


class CardState(NamedTuple):
    """A card, or a part of one, as it is now.

    - `name`: as its driver calls it.
    - `capability`: its compute capability, (9, 0) for Hopper.
    - `memory`: bytes that CUDA may allot in all: less than the card has, by what the driver reserves.
    - `used`: bytes of these that anything uses.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    used: int


def card_state(ordinal: int) -> CardState | None:
    """The card that CUDA shows to this process as number `ordinal`; `None` where a driver is silent."""
    unique = _unique_id(ordinal)
    if unique is None:
        return None
    import pynvml  # which only processes with a card need

    try:
        with _session(pynvml):
            return _state(pynvml, unique)
    except pynvml.NVMLError:
        return None


def _unique_id(ordinal: int) -> uuid.UUID | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, unique = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        or cuda.cuDeviceGetUuid_v2(ctypes.byref(unique), device)
    )
    return None if failed else uuid.UUID(bytes=bytes(unique))


@contextlib.contextmanager
def _session(nvml: ModuleType) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _state(nvml: ModuleType, unique: uuid.UUID) -> CardState:
    whole = part = _handle(nvml, f"GPU-{unique}")
    if part is None:
        part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{unique}")
        whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
    memory = nvml.nvmlDeviceGetMemoryInfo(part, version=nvml.nvmlMemory_v2)
    return CardState(
        nvml.nvmlDeviceGetName(part),
        tuple(nvml.nvmlDeviceGetCudaComputeCapability(whole)),
        memory.total - memory.reserved,
        memory.used,
    )


def _handle(nvml: ModuleType, name: str) -> Any | None:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        return None
