"""A server's life: from a loaded model to its last answer."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jdllm.api.app import Access, create_app
from jdllm.api.metrics import Metrics
from jdllm.api.service import Service, Settings
from jdllm.errors import ConfigError
from jdllm.llm import LLM
from jdllm.serving.async_engine import AsyncEngine

HEADER_SECONDS = 30.0
"""How long a connection may take until its first request has begun."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_IDLE_SECONDS = 30
_HEADER_BYTES = 64 << 10


class Tls(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path


def bind(host: str, port: int) -> socket.socket:
    """Take an address, without listening yet: who comes before the server is ready is refused.

    Arguments:
    - `port`: 0 for any that is free.

    Raises `ConfigError` where it cannot be had.
    """
    try:
        (family, kind, *_, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as e:
        raise ConfigError(f"cannot listen on {host} port {port}: {e}") from None
    return bound


class _Protocol(H11Protocol):
    """Closes connections that say nothing for too long."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """Drains on a first signal, and stops on a second one, whichever they are; then `run` returns."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(llm: LLM, settings: Settings, access: Access, bound: socket.socket, tls: Tls | None = None) -> int:
    """Serve a model until a signal ends it, or its engine cannot go on.

    Arguments:
    - `llm`: the model, warmed up; it is closed at the end.
    - `bound`: of `bind`.

    Returns the exit code: 0 after a signal, 1 where the engine cannot go on.
    """
    config = uvicorn.Config(
        app="",
        http=_Protocol,
        ssl_certfile=tls and tls.certificate,
        ssl_keyfile=tls and tls.key,
        timeout_keep_alive=_IDLE_SECONDS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        server_header=False,
        log_level="info",
        access_log=False,
    )
    server = _Server(config)

    def stop(_: Exception) -> None:
        server.should_exit = True

    engine = AsyncEngine(llm.engine, on_dead=stop)
    metrics = Metrics(settings.names[0], llm.engine, llm.executables)
    llm.engine.observe = metrics.observe_part
    service = Service(llm, engine, settings, metrics)
    config.app = create_app(service, access)
    try:
        server.run(sockets=[bound])
    finally:
        service.close()
        engine.close()
        llm.close()
    return 0 if engine.error is None else 1
