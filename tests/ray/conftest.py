"""Servers of the bundled model, alone and as replicas of Ray Serve, in an environment of this lane's own."""

from collections.abc import Iterator

import pytest

from tests.clients.servers import Server, Starter


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Starter]:
    """Starts servers that compile what requests need."""
    assert pytestconfig.cache is not None
    starter = Starter(tmp_path_factory.mktemp("servers"), pytestconfig.cache.mkdir("ray"))
    yield starter
    starter.end()


@pytest.fixture(scope="session")
def plain(start_server: Starter) -> Server:
    """The oracle: a server without Ray."""
    return start_server("--no-warmup").ready()
