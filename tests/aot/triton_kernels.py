"""What Triton compiles for a card that is not there, against what the card has."""

from typing import Any

from benchmarks.operators.triton_compiled import taken
from jdllm.pallas.triton_launch import shared_kib

KIB = 1024


def check_kernel(kernel: Any, capability: float, most_spilled: int = 0) -> None:
    """It keeps to the registers and to the shared memory of the card.

    Arguments:
    - `most_spilled`: bytes of a thread.
    """
    found = taken(kernel)
    assert found.architecture.rstrip("a") == f"sm_{round(10 * capability)}"
    assert found.spilled <= most_spilled
    assert 0 < found.shared <= shared_kib(capability) * KIB
