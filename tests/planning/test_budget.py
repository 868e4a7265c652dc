"""Budgets as users write them, and the refusal of a step."""

import dataclasses
import pickle
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.byte_sizes import DEFAULT_HOST_MEMORY, format_bytes, parse_bytes, parse_host_memory
from jdllm.errors import ConfigError
from jdllm.planning import budget, host
from jdllm.planning.budget import (
    DEFAULT_OVERHEAD,
    GUARD,
    Budget,
    MemoryBudgetError,
    device_budget,
    device_memory,
    usable_host_memory,
)
from tests.planning.fake_drivers import FakeCard, FakeDrivers

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("24G", 24 * 2**30),
        ("512m", 2**29),
        ("1T", 2**40),
        ("1 TB", 10**12),
        (" 512 MiB ", 2**29),
        ("7", 7),
        (7, 7),
    ],
)
def test_sizes(text: str | int, size: int):
    assert parse_bytes(text) == size


@given(st.integers(1, 2**50))
def test_plain_numbers_are_bytes(size: int):
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size}B") == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "0.1B", "24 parsecs", "1e9", "nan", "24GiB 3", "9" * 400]
)
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ConfigError, match="host_memory is"):
        parse_bytes(text, "host_memory")


def test_a_cpu_has_no_budget_of_its_own():
    device = jax.devices("cpu")[0]
    assert device_memory(device) is None
    assert device_budget(device, None, "1GiB") is None
    assert device_budget(device, "2GiB", "0") == Budget(2 * 2**30, 0, 0)


class Device:
    """What JAX says of a card: CUDA's number, and bytes that XLA may allot, holds, and has given out; the
    largest piece of the rest has `free` bytes."""

    platform = "gpu"

    def __init__(self, ordinal: int, arrays: int = 0, pool: int = 2 * GIB, free: int = 0):
        self.local_hardware_id = ordinal
        self.stats = {"bytes_limit": 30 * GIB, "pool_bytes": pool, "bytes_in_use": arrays}
        self.stats["largest_free_block_bytes"] = free or max(0, pool - arrays)

    def memory_stats(self) -> dict[str, int]:
        return self.stats


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch):
    """CUDA shows the second of two cards only."""
    other, shown = (
        FakeCard("other", (9, 0), 80 * GIB, 0, 70 * GIB),
        FakeCard("shown", (9, 0), 40 * GIB, 0, 3 * GIB),
    )
    monkeypatch.setattr("jdllm.planning.budget.jax.device_put", lambda x, device: x)
    FakeDrivers(monkeypatch, visible=[shown], present=[other, shown])


@pytest.mark.usefixtures("cards")
def test_the_overhead_is_what_the_driver_counts_beyond_the_pool():
    assert device_memory(Device(0)) == (30 * GIB, GIB, 0, 0)
    unknown = device_memory(Device(1))
    assert unknown is not None
    assert unknown.overhead == DEFAULT_OVERHEAD


@pytest.mark.usefixtures("cards")
def test_a_budget_is_what_other_arrays_leave():
    assert device_budget(Device(0, 5 * GIB), None, 0) == Budget(31 * GIB, GIB + GUARD, 0)
    assert device_budget(Device(0, 5 * GIB), None, 0, held=4 * GIB) == Budget(30 * GIB, GIB + GUARD, 0)
    with pytest.raises(
        ConfigError, match=f"memory is {31 * GIB} bytes, and XLA may use {30 * GIB} .* beside {GIB}"
    ):
        device_budget(Device(0, 5 * GIB), "31GiB", 0, held=4 * GIB)
    with pytest.raises(
        ConfigError, match=f"memory is {32 * GIB} bytes, and XLA may use {31 * GIB} of this device: "
    ):
        device_budget(Device(0), "32GiB", 0)


@pytest.mark.usefixtures("cards")
def test_what_lies_between_arrays_is_no_room_for_a_pool():
    scattered = Device(0, arrays=GIB, pool=3 * GIB, free=GIB // 2)
    assert device_memory(scattered) == (30 * GIB, 0, GIB, 3 * GIB // 2)
    whole = device_budget(Device(0, arrays=GIB, pool=3 * GIB), None, 0, held=GIB)
    assert whole is not None
    assert device_budget(scattered, None, 0, held=GIB) == dataclasses.replace(
        whole, device=whole.device - 3 * GIB // 2
    )
    asked = device_budget(scattered, "20GiB", 0, held=GIB)
    assert asked is not None
    assert asked.device == 20 * GIB


def test_no_host_memory_is_a_size():
    assert [parse_host_memory(text) for text in ("0", 0, "1K")] == [0, 0, 1024]
    with pytest.raises(ConfigError, match="--host-memory is"):
        parse_host_memory("-1", "--host-memory")


def test_a_refusal_says_what_would_fit():
    error = MemoryBudgetError("a step of 9 rows", 3 * 2**30, 2**30, 4096)
    assert str(error) == (
        "a step of 9 rows needs at least 3.00 GiB on the device, weights included, and the budget is"
        " 1.00 GiB: the longest context that fits is 4096 tokens"
    )
    assert (error.needed_bytes, error.available_bytes, error.max_context) == (3 * 2**30, 2**30, 4096)
    assert str(MemoryBudgetError("a step", 2, 1, 0)).endswith("no context fits")


@given(st.integers(0, 2**45), st.integers(1, 2**30))
def test_a_refusal_never_rounds_its_need_to_the_budget(budget: int, more: int):
    words = str(MemoryBudgetError("a step", budget + more, budget, 0))
    match = re.search(r"at least (\S+ \S+) on .* budget is (\S+ \S+):", words)
    assert match is not None
    assert parse_bytes(match[1]) >= budget + more
    assert budget == 0 or parse_bytes(match[2]) <= budget


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (2**30, "1.00 GiB"),
        (2**41, "2048.00 GiB"),
    ],
)
def test_bytes_in_the_largest_unit_reached(count: int, text: str):
    assert format_bytes(count) == text


def test_a_refusal_is_pickled_with_what_it_says():
    refusal = MemoryBudgetError("a step", 3 * 2**30, 2**30, 7, "context without a cache")
    copy = pickle.loads(pickle.dumps(refusal))
    assert (str(copy), copy.needed_bytes, copy.max_context) == (str(refusal), 3 * 2**30, 7)


@pytest.mark.usefixtures("cards")
class TestHostMemory:
    """What pins it is no part of what a budget asks about: it is asked for once, before."""

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(budget, "available", lambda: 40 * GIB)
        monkeypatch.setattr(host, "available", lambda **_: 40 * GIB)

    def test_of_the_default_as_much_as_there_is(self):
        assert usable_host_memory(Device(0), DEFAULT_HOST_MEMORY) == 40 * GIB

    def test_more_than_there_is_is_refused(self):
        assert usable_host_memory(Device(0), "40GiB") == 40 * GIB
        with pytest.raises(ConfigError, match=f"this machine has {40 * GIB} left"):
            usable_host_memory(Device(0), "41GiB")

    def test_a_budget_takes_what_was_found(self):
        found = device_budget(Device(0), None, 41 * GIB)
        assert found is not None
        assert found.host == 41 * GIB
