"""The device that a function is being traced for."""

import functools
import importlib
from typing import NamedTuple

from jax.extend import backend

TRITON_CAPABILITY = 8.0
"""The least that Triton's kernels run on: Ampere."""


class Target(NamedTuple):
    """What a choice of kernels depends on.

    - `on_cuda`: whether it is an NVIDIA GPU.
    - `capability`: its compute capability, 9.0 for Hopper; `None` where that is not known.
    """

    on_cuda: bool
    capability: float | None

    @property
    def hopper(self) -> bool:
        """Whether kernels for Hopper run on it; a device of unknown capability is taken for one."""
        return self.on_cuda and (self.capability is None or 9 <= self.capability < 10)

    def check_hopper(self, what: str) -> None:
        """Raise `NotImplementedError`, naming the operator, where its kernel for Hopper cannot run."""
        if not self.hopper:
            raise NotImplementedError(f"the mosaic_gpu form of {what} runs on Hopper only")

    def check_triton(self, what: str) -> None:
        """Raise `NotImplementedError`, naming the operator, where its kernel in Triton cannot run."""
        if not self.on_cuda or (self.capability or 0) < TRITON_CAPABILITY:
            raise NotImplementedError(f"the triton form of {what} runs on Ampere and newer cards only")
        if not _has_triton():
            raise NotImplementedError(
                f"the triton form of {what} needs jax-triton, of the extras cuda12 and cuda13"
            )


def target(platform: str | None = None) -> Target:
    """JAX's default device, which is the described one while `jdllm.planning.aot` compiles for a card.

    Arguments:
    - `platform`: "cpu" or "cuda" instead of the default device's platform.
    """
    device = backend.get_default_device()
    capability = getattr(device, "compute_capability", None)
    on_cuda = (platform or device.platform) in ("gpu", "cuda")
    return Target(on_cuda, float(capability) if on_cuda and capability else None)


@functools.cache
def _has_triton() -> bool:
    try:
        return importlib.import_module("jax_triton.triton_lib").CAN_USE_TRITON
    except ImportError:
        return False


def find_kernel_runtime() -> None:
    """Tell XLA where the library is that Mosaic kernels call.

    JAX does so once it writes a kernel, and XLA looks when it compiles or loads the first one: too late in a
    process that only loads what others have compiled.
    """
    importlib.import_module("jax.experimental.mosaic.gpu")
