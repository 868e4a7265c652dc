"""Sums over cards without their kernel: who can exchange, what each card knows, and the portable form."""

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdllm.pallas.exchange import addresses_of, described_addresses, rows_of_all_cards, sum_over_cards
from jdllm.pallas.exchange.layout import (
    LINE_BYTES,
    MAX_BLOCKS,
    ROUNDS_OFFSET,
    ROW_AREA_BYTES,
    ROW_AREAS,
    ROW_TURNS,
    ROWS_OFFSET,
    SLOT_BYTES,
    TURNS,
    memory_bytes,
    row_slot_offset,
    slot_offset,
)
from jdllm.pallas.exchange.limits import check_join, check_mosaic_gpu
from jdllm.pallas.exchange.memory import address_table, can_exchange

ROW_SLOT_BYTES = ROW_AREAS * ROW_AREA_BYTES


def card(number: int, **other: Any) -> SimpleNamespace:
    known = {"platform": "gpu", "compute_capability": "9.0", "process_index": 0, "local_hardware_id": number}
    return SimpleNamespace(**(known | other))


def reached(a: int, b: int) -> bool:
    return True


def test_cards_of_one_process_that_reach_each_other_can_exchange():
    assert can_exchange([card(0), card(1)], reached)
    assert can_exchange([card(number) for number in (3, 1, 0, 2)], reached)


@pytest.mark.parametrize(
    "other",
    [
        {"platform": "cpu"},
        {"compute_capability": "8.0"},
        {"compute_capability": "10.0"},
        {"process_index": 1},
    ],
)
def test_other_devices_cannot_exchange(other: dict[str, Any]):
    assert not can_exchange([card(0), card(1, **other)], reached)


def test_one_card_has_nobody_and_too_many_have_no_flags():
    assert not can_exchange([card(0)], reached)
    assert can_exchange([card(number) for number in range(30)], reached)
    assert not can_exchange([card(number) for number in range(31)], reached)


def test_every_card_has_to_reach_every_other():
    asked: list[tuple[int, int]] = []

    def all_but_one(a: int, b: int) -> bool:
        asked.append((a, b))
        return (a, b) != (3, 1)

    cards = [card(number) for number in (1, 2, 3)]
    assert not can_exchange(cards, all_but_one)
    assert can_exchange(cards[:2], all_but_one)
    assert all(a != b for a, b in asked)


@pytest.mark.parametrize(
    ("allocator", "reachable"), [("platform", True), ("BFC", True), ("cuda_async", False)]
)
def test_memory_of_other_allocators_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, allocator: str, reachable: bool
):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    assert can_exchange([card(0), card(1)], reached) is reachable


def test_devices_without_kernels_have_no_addresses():
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("cards",))
    assert addresses_of(mesh) is None
    assert described_addresses(mesh) is None


@pytest.mark.parametrize("cards", [2, 3, 8])
def test_each_card_knows_its_number_and_the_cards_behind_it(cards: int):
    addresses = [0x7F00_0000_0000 + 0x1_8000_0000 * number for number in range(cards)]
    table = address_table(addresses)
    assert table.dtype == np.int32
    for number, row in enumerate(table):
        own, *ring = (int.from_bytes(row[i : i + 2].tobytes(), "little") for i in range(0, len(row), 2))
        assert own == number
        assert ring == addresses[number:] + addresses[:number]


@pytest.mark.parametrize("cards", [2, 8, 30])
def test_nothing_in_the_memory_overlaps(cards: int):
    lines = [block * LINE_BYTES for block in range(MAX_BLOCKS)]
    flags = [(line + 4 * sender, 4) for line in lines for sender in range(cards)]
    numbers = [(line + offset, 4) for line in lines for offset in (ROUNDS_OFFSET, ROWS_OFFSET)]
    slots = [(slot_offset(turn, s, cards), SLOT_BYTES) for turn in range(TURNS) for s in range(cards)]
    rows = [(row_slot_offset(t, s, cards), ROW_SLOT_BYTES) for t in range(ROW_TURNS) for s in range(cards)]
    taken = sorted(flags + numbers + slots + rows)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(taken))
    assert sum(taken[-1]) <= memory_bytes(cards)
    assert all(start % 16 == 0 for start, _ in slots + rows)  # what a thread moves at once


@pytest.mark.parametrize(
    ("shape", "dtype", "limit"),
    [
        ((32, 4096), jnp.float32, "bfloat16 or float16, not float32"),
        ((257, 1024), jnp.bfloat16, "sum of 4 cards takes 1 to 256 rows, not 257"),
        ((32, 4100), jnp.bfloat16, "multiples of 8 columns, not 4100"),
    ],
)
def test_limits_are_named(shape: tuple[int, int], dtype: Any, limit: str):
    with pytest.raises(NotImplementedError, match=limit):
        check_mosaic_gpu(jax.ShapeDtypeStruct(shape, dtype), 4)


@pytest.mark.parametrize(("shape", "cards"), [((1, 8), 8), ((256, 8192), 4), ((32768, 4096), 2)])
def test_what_the_kernel_adds(shape: tuple[int, int], cards: int):
    check_mosaic_gpu(jax.ShapeDtypeStruct(shape, jnp.bfloat16), cards)


def test_rows_are_joined_of_any_number_of_cards():
    check_join(jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="bfloat16 or float16, not float32"):
        check_join(jax.ShapeDtypeStruct((32, 4096), jnp.float32))


def test_the_portable_form_joins_the_rows_of_all_cards():
    parts = np.random.default_rng(0).standard_normal((3, 5, 16)).astype(np.float32)
    join = jax.vmap(lambda part, row: rows_of_all_cards(part, row, "cards"), axis_name="cards")
    np.testing.assert_array_equal(join(parts, np.zeros((3, 1, 8), np.int32)), [parts.reshape(15, 16)] * 3)


def test_the_portable_form_adds_what_all_cards_have():
    parts = np.random.default_rng(0).integers(-8, 8, (3, 5, 16)).astype(np.float32)
    add = jax.vmap(lambda part, row: sum_over_cards(part, row, "cards"), axis_name="cards")
    np.testing.assert_array_equal(add(parts, np.zeros((3, 1, 8), np.int32)), [parts.sum(axis=0)] * 3)


def test_the_kernel_is_refused_elsewhere():
    with pytest.raises(NotImplementedError, match="runs on Hopper only"):
        sum_over_cards(
            jnp.zeros((8, 16), jnp.bfloat16),
            jnp.zeros((1, 6), jnp.int32),
            "cards",
            implementation="mosaic_gpu",
        )
