"""Real servers for clients that we did not write. Their packages are in an environment of this lane's own."""

from collections.abc import Iterator

import pytest

from tests.clients.servers import Server, Starter

API_KEY = "key-of-these-tests"


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Other lanes need not import what these tests import: they are collected where they are asked for."""
    return None if "clients" in config.option.markexpr.replace("not clients", "") else True


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Starter]:
    """Starts further servers: see `Starter`."""
    assert pytestconfig.cache is not None
    starter = Starter(tmp_path_factory.mktemp("servers"), pytestconfig.cache.mkdir("clients"))
    yield starter
    starter.end()


@pytest.fixture(scope="session")
def server(start_server: Starter) -> Server:
    """A server of the bundled model in float32, which asks for a key."""
    return start_server(api_key=API_KEY).ready()
