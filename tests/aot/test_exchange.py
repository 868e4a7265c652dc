"""Sums over cards compiled for several H200 that are not there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm.pallas.exchange import described_addresses, sum_over_cards
from jdllm.planning.aot import compile_for, target_devices

pytestmark = pytest.mark.aot

AXIS, TURNS = "cards", 4


@pytest.mark.parametrize(
    ("cards", "rows"), [(2, 1), (2, 32), (2, 256), (2, 1000), (2, 8192), (4, 32), (4, 256), (8, 1), (8, 256)]
)
def test_a_sum_is_one_kernel_that_keeps_to_registers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cards: int, rows: int
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = Mesh(np.array(target_devices("h200", cards)), (AXIS,))
    addresses = described_addresses(mesh)

    def added(parts: jax.Array, addresses: jax.Array) -> jax.Array:
        return lax.fori_loop(0, TURNS, lambda _, part: sum_over_cards(part, addresses, AXIS), parts)

    at = NamedSharding(mesh, PartitionSpec(AXIS))
    parts = jax.ShapeDtypeStruct((cards * rows, 3584), jnp.bfloat16, sharding=at)
    executable = compile_for("h200", added, parts, addresses)
    text = executable.as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "all-reduce" not in text
    printed = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", printed) == [("0", "0")], printed
