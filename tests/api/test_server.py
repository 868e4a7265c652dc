import socket
import sys
from pathlib import Path

import pytest
import uvicorn

from jdllm.api.app import Access
from jdllm.api.server import Tls, bind, serve
from jdllm.api.service import Settings
from jdllm.demo import checkpoint_path
from jdllm.errors import ConfigError
from jdllm.llm import LLM
from tests.conftest import KV_POOL

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


def test_what_cannot_be_is_noticed_before_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A certificate that is not there stands for all that the server is made of."""
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda _: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    llm = LLM(checkpoint_path(), max_num_batched_tokens=256, kv_pool=KV_POOL, progress=False)
    settings = Settings(("demo",), llm.default_sampling())
    warmed: list[str] = []
    missing = Tls(tmp_path / "certificate.pem", tmp_path / "key.pem")
    with bind(HOST, 0) as bound, pytest.raises((ConfigError, OSError)):
        serve(llm, settings, Access(), bound, missing, lambda: warmed.append("warmed"))
    assert not warmed
