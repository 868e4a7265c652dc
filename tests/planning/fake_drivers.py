"""Drivers of a machine that is not there: what a test makes up is the oracle's card."""

import ctypes
import sys
import uuid
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest


class FakeCard(NamedTuple):
    """A card, or a part of one, whose `whole` card is then named; bytes as NVML counts them."""

    name: str
    capability: tuple[int, int]
    total: int
    reserved: int
    used: int
    whole: "FakeCard | None" = None

    @property
    def unique(self) -> uuid.UUID:
        return uuid.uuid5(uuid.NAMESPACE_OID, self.name)

    @property
    def nvml_name(self) -> str:
        return f"{'GPU' if self.whole is None else 'MIG'}-{self.unique}"


class NVMLError(Exception):
    pass


class FakeDrivers:
    """Puts `visible` in the place of CUDA's driver, and `present` in that of NVML; `None` is a missing one.

    - `visible`: in the order in which CUDA numbers them for this process.
    - `sessions`: of NVML, that are open.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        visible: Sequence[FakeCard] | None,
        present: Sequence[FakeCard] | None,
    ):
        self.visible, self.present, self.sessions = visible, present, 0
        monkeypatch.setattr("jdllm.planning.driver.ctypes.CDLL", self._load)
        nvml = ModuleType("pynvml")
        nvml.__dict__.update(
            NVMLError=NVMLError,
            nvmlMemory_v2=2,
            nvmlInit=self._init,
            nvmlShutdown=self._shutdown,
            nvmlDeviceGetHandleByUUID=self._by_uuid,
            nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda part: part.whole,
            nvmlDeviceGetName=lambda card: card.name,
            nvmlDeviceGetCudaComputeCapability=self._capability,
            nvmlDeviceGetMemoryInfo=self._memory,
        )
        monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def _load(self, name: str) -> SimpleNamespace:
        if self.visible is None or name != "libcuda.so.1":
            raise OSError(name)
        return SimpleNamespace(cuInit=lambda _: 0, cuDeviceGet=self._get, cuDeviceGetUuid_v2=self._uuid)

    def _get(self, device: ctypes.c_int, ordinal: int) -> int:
        if self.visible is None or ordinal >= len(self.visible):
            return 101
        device._obj.value = ordinal  # pyright: ignore[reportAttributeAccessIssue]
        return 0

    def _uuid(self, unique: ctypes.Array, device: ctypes.c_int) -> int:
        assert self.visible is not None
        unique._obj[:] = self.visible[device.value].unique.bytes  # pyright: ignore[reportAttributeAccessIssue]
        return 0

    def _init(self) -> None:
        if self.present is None:
            raise NVMLError("no library")
        self.sessions += 1

    def _shutdown(self) -> None:
        self.sessions -= 1

    def _by_uuid(self, name: str) -> FakeCard:
        for card in self.present or ():
            if card.nvml_name == name:
                return card
        raise NVMLError("not found")

    def _capability(self, card: FakeCard) -> tuple[int, int]:
        if card.whole is not None:
            raise NVMLError("not supported by a part of a card")
        return card.capability

    def _memory(self, card: FakeCard, version: int) -> SimpleNamespace:
        assert version == 2
        return SimpleNamespace(total=card.total, reserved=card.reserved, used=card.used)
