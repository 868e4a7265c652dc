"""Kernels that one process has compiled run in another one, which has written none itself."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import pathlib
import sys

import jax
import numpy as np

from jdllm.compiling.store import ExecutableStore
from jdllm.compiling.executables import Executables
from jdllm.pallas.attention import attention

executables = Executables("cuda", ExecutableStore(pathlib.Path(sys.argv[1])))
q = jax.device_put(np.linspace(-2, 2, 96 * 8 * 128).reshape(96, 8, 128).astype(jax.numpy.bfloat16))
bounds = np.zeros(96, np.int32), np.full(96, 96, np.int32)
out = executables.call(attention, q, q, q, *bounds, scale=0.1, implementation=sys.argv[2]).o
print(executables.compiled, executables.loaded, np.asarray(out, np.float32).sum())
"""


def run(directory: Path, form: str) -> tuple[int, int, float]:
    command = [sys.executable, "-c", SCRIPT, str(directory), form]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "JIT session error" not in done.stderr
    compiled, loaded, total = done.stdout.split()
    return int(compiled), int(loaded), float(total)


@pytest.mark.parametrize("form", ["mosaic_gpu", "triton"])
def test_a_kernel_is_loaded_where_none_was_written(form: str, tmp_path: Path):
    compiled, loaded, total = run(tmp_path / "executables", form)
    assert (compiled, loaded) == (1, 0)
    assert run(tmp_path / "executables", form) == (0, 1, total)
