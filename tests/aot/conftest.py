"""The compile-only lane: XLA optimises for the card as it does for users."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _optimised() -> None:
    jax.config.update("jax_disable_most_optimizations", False)
