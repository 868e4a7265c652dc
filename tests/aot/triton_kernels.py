"""What Triton compiles for a card that is not there, against what the card has."""

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jdllm.pallas.triton_launch import shared_kib
from tests.aot.chains import spills_of

MOST_SPILLED_F32 = 32  # bytes of a thread
KIB = 1024


def check_kernel(kernel: Any, dtype: jnp.dtype, capability: float, most_spilled: int = 0) -> None:
    """It keeps to the registers and to the shared memory of the card.

    Arguments:
    - `most_spilled`: bytes of a thread, of 16-bit types.
    """
    nvidia = importlib.import_module("nvidia").__path__
    (ptxas,) = (found for root in nvidia for found in Path(root).glob("*/bin/ptxas"))
    architecture = re.search(r"\.target (sm_\w+)", kernel.binary)
    assert architecture
    assert architecture[1].rstrip("a") == f"sm_{round(10 * capability)}"
    command = [ptxas, "--verbose", "--gpu-name", architecture[1], "--output-file", "/dev/null", "-"]
    assembled = subprocess.run(command, input=kernel.binary, capture_output=True, text=True, check=True)
    ((_, spilled),) = spills_of(assembled.stderr)
    assert int(spilled) <= (MOST_SPILLED_F32 if dtype == jnp.float32 else most_spilled)
    assert 0 < kernel.shared_mem_bytes <= shared_kib(capability) * KIB
