"""A server of its own for each test."""

from collections.abc import Iterator

import pytest

from tests.bench.fake_server import FakeServer, serving


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving() as server:
        yield server
