"""The tests of the benchmarks are a part of the slow lane, and have a target of their own."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("demo")
