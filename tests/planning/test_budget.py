"""Budgets as users write them, and the refusal of a step."""

import pickle
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.errors import ConfigError
from jdllm.planning.budget import (
    Budget,
    MemoryBudgetError,
    device_budget,
    device_memory,
    format_bytes,
    parse_bytes,
    parse_host_memory,
)


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
