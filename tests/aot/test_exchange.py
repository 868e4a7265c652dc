"""Sums over cards compiled for several H200 that are not there."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm.pallas.exchange import described_addresses, rows_of_all_cards, sum_over_cards
from jdllm.planning.aot import compile_for, target_devices

pytestmark = pytest.mark.aot

AXIS, TURNS = "cards", 4


@pytest.mark.parametrize(
    ("cards", "rows"), [(2, 1), (2, 32), (2, 256), (2, 1000), (2, 8192), (4, 32), (4, 256), (8, 1), (8, 256)]
)
def test_a_sum_is_one_kernel_that_keeps_to_registers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cards: int, rows: int
):
    check_one_kernel(monkeypatch, capfd, cards, rows, lambda part, at: sum_over_cards(part, at, AXIS))


@pytest.mark.parametrize(("cards", "rows"), [(2, 512), (2, 8192), (4, 1000), (8, 512)])
def test_joining_rows_is_one_kernel_that_keeps_to_registers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cards: int, rows: int
):
    def turn(part: jax.Array, at: jax.Array) -> jax.Array:
        return rows_of_all_cards(part, at, AXIS)[: len(part)]

    check_one_kernel(monkeypatch, capfd, cards, rows, turn)


def check_one_kernel(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    cards: int,
    rows: int,
    turn: Callable[[jax.Array, jax.Array], jax.Array],
):
    """A loop of turns, each from the rows of this card to as many, has one kernel, and no collective."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = Mesh(np.array(target_devices("h200", cards)), (AXIS,))
    addresses = described_addresses(mesh)

    def turns(parts: jax.Array, addresses: jax.Array) -> jax.Array:
        return lax.fori_loop(0, TURNS, lambda _, part: turn(part, addresses), parts)

    at = NamedSharding(mesh, PartitionSpec(AXIS))
    parts = jax.ShapeDtypeStruct((cards * rows, 3584), jnp.bfloat16, sharding=at)
    executable = compile_for("h200", turns, parts, addresses)
    text = executable.as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "all-reduce" not in text
    assert "all-gather" not in text
    printed = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", printed) == [("0", "0")], printed
