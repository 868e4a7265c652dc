import socket

import pytest

from jdllm.api.server import bind
from jdllm.errors import ConfigError

HOST = "127.0.0.1"


def test_a_port_is_one_server_s_before_it_listens():
    with bind(HOST, 0) as taken, pytest.raises(ConfigError, match=f"port {taken.getsockname()[1]}"):
        bind(HOST, taken.getsockname()[1])


def test_who_comes_before_the_server_listens_is_refused():
    with bind(HOST, 0) as taken, pytest.raises(ConnectionRefusedError):
        socket.create_connection(taken.getsockname())


def test_a_port_is_free_again_as_soon_as_its_server_has_ended():
    with bind(HOST, 0) as first:
        address = first.getsockname()
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as `serve` does
        first.listen()
        with socket.create_connection(address):
            first.accept()[0].close()  # the server's end is closed first and waits
    bind(HOST, address[1]).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_cannot_be_had_is_a_mistake(host: str):
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(host, 0)
