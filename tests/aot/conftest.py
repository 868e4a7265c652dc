"""The compile-only lane: XLA optimises for the card as it does for users."""

import importlib
from typing import Any

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _optimised() -> None:
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Triton compiles from here on: PTX and bytes of shared memory."""
    triton_lib = importlib.import_module("jax_triton.triton_lib")
    compiled, compile_kernel = [], triton_lib.compile_ttir_inplace

    def keep(*args: Any) -> Any:
        compiled.append(compile_kernel(*args))
        return compiled[-1]

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", keep)
    monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
    return compiled
