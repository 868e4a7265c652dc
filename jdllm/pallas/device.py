"""The device that a function is being traced for."""

import functools
import importlib.util
from typing import Literal, NamedTuple, get_args

import jax
from jax.extend import backend

from jdllm.errors import ConfigError

AMPERE = 8.0
"""The least compute capability of a card: older ones have no products of bfloat16."""


Kernels = Literal["auto", "triton", "xla"]
"""Which kernels of jdllm may run: any that suits the card, those in Triton only, or none."""

_preferred = jax.make_user_context("auto")


class Target(NamedTuple):
    """What a choice of kernels depends on.

    - `on_cuda`: whether it is an NVIDIA GPU.
    - `capability`: its compute capability, 9.0 for Hopper; `None` where that is not known.
    - `kernels`: those that may run.
    - `triton`: whether kernels in Triton can be compiled for it.
    """

    on_cuda: bool
    capability: float | None
    kernels: Kernels = "auto"
    triton: bool = True

    @property
    def hopper(self) -> bool:
        """Whether kernels for Hopper run on it; a device of unknown capability is taken for one."""
        return self.on_cuda and (self.capability is None or 9 <= self.capability < 10)

    def check_card(self) -> None:
        """Raise `ConfigError` for a card that jdllm does not run on."""
        if self.on_cuda and self.capability is not None and self.capability < AMPERE:
            raise ConfigError(
                f"the card has compute capability {self.capability}: jdllm runs on NVIDIA cards from Ampere"
                f" ({AMPERE}) on, or on the CPU with JAX_PLATFORMS=cpu"
            )

    def check_hopper(self, what: str) -> None:
        """Raise `NotImplementedError`, naming the operator, where its kernel for Hopper cannot run."""
        if not self.hopper:
            raise NotImplementedError(f"the mosaic_gpu form of {what} runs on Hopper only")

    def check_triton(self, what: str) -> None:
        """Raise `NotImplementedError`, naming the operator, where its kernel in Triton cannot run."""
        if not self.on_cuda or (self.capability or 0) < AMPERE:
            raise NotImplementedError(f"the triton form of {what} runs on Ampere and newer cards only")
        if not self.triton:
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
    known = float(capability) if on_cuda and capability else None
    return Target(on_cuda, known, _preferred.value, _has_triton())


def preferring(kernels: str):
    """A context in which operators choose among these kernels, one of `Kernels`, unless a form is asked for.

    What `jax.jit` has traced is kept apart by it. Raises `ConfigError` for any other name.
    """
    return _preferred(known_kernels(kernels))


def known_kernels(kernels: str) -> Kernels:
    """`kernels` as one of `Kernels`; raises `ConfigError` for any other name."""
    for known in get_args(Kernels):
        if kernels == known:
            return known
    raise ConfigError(f"kernels are one of {', '.join(get_args(Kernels))}, not {kernels!r}")


CPU = Target(on_cuda=False, capability=None)
HOPPER = Target(on_cuda=True, capability=9.0)


@functools.cache
def _has_triton() -> bool:
    return all(importlib.util.find_spec(package) for package in ("jax_triton", "triton"))


def find_kernel_runtime() -> None:
    """Tell XLA where the library is that Mosaic kernels call.

    JAX does so once it writes a kernel, and XLA looks when it compiles or loads the first one: too late in a
    process that only loads what others have compiled.
    """
    importlib.import_module("jax.experimental.mosaic.gpu")
