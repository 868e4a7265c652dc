"""The compile-only lane: XLA optimises for the card as it does for users."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from benchmarks.operators.triton_compiled import compiled_kernels


@pytest.fixture(autouse=True, scope="package")
def _optimised() -> None:
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def kernels() -> Iterator[list[Any]]:
    """What Triton compiles from here on: PTX and bytes of shared memory."""
    with compiled_kernels() as kept:
        yield kept
