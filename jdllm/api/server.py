"""A server's life: from a loaded model to its last answer."""

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jdllm.api.app import Access
from jdllm.api.errors import bad_request
from jdllm.api.served import LOGGING, served, settle
from jdllm.api.service import Settings
from jdllm.errors import ConfigError
from jdllm.llm import LLM

HEAD_SECONDS = 30.0
"""How long the head of a request may take to arrive."""

IDLE_SECONDS = 30
"""How long a connection without a request stays open."""

_REUSED = socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FAREWELL_SECONDS = 2.0
"""How long clients have to take the last of an answer that a second signal ends."""

_HEADER_BYTES = 64 << 10


class Tls(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise `ConfigError` where TLS cannot be had with these."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key)
        except OSError as e:  # what is wrong with their content too
            said = e.strerror or str(e)
            raise ConfigError(
                f"--ssl-certfile {self.certificate} and --ssl-keyfile {self.key} cannot be used: {said}"
            ) from None


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
        try:
            return _bound(family, kind, address, reused=False)
        except OSError:
            # Connections of a server that has just ended may be left, which reusing overlooks. It overlooks a
            # server that does not listen yet too, unless that has not set the option.
            return _bound(family, kind, address, reused=True)
    except OSError as e:
        raise ConfigError(f"cannot listen on {host} port {port}: {e}") from None


def _bound(family: int, kind: int, address: Any, *, reused: bool) -> socket.socket:
    bound = socket.socket(family, kind)
    try:
        if reused:
            bound.setsockopt(*_REUSED)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class _Protocol(H11Protocol):
    """Gives up clients that keep it waiting, and tells those that speak no HTTP so in OpenAI's shape."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._expect_head()
        elif self._head is not None:
            self._head.cancel()
            self._head = None

    def _expect_head(self) -> None:
        """Close the connection unless the request that has begun to arrive goes on to its body in time."""
        if self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self._close)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Who is answered before the body has come may send the rest of it for ever.
        if self.conn.their_state is h11.SEND_BODY:
            self._close()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # what answers the head of this request is heard no more
        answer = bad_request(msg, code="invalid_http").response()
        headers = [*answer.raw_headers, (b"connection", b"close")]
        self.transport.write(
            self.conn.send(h11.Response(status_code=400, headers=headers, reason=b"Bad Request"))
            + self.conn.send(h11.Data(data=bytes(answer.body)))
            + self.conn.send(h11.EndOfMessage())
        )
        self.transport.close()


class _Server(uvicorn.Server):
    """Drains on a first signal, and stops on a second one, whichever they are; then `run` returns.

    Arguments:
    - `end_calls`: called in the event loop on the second signal: lets whoever waits have an end.
    """

    def __init__(self, config: uvicorn.Config, end_calls: Callable[[], None]):
        super().__init__(config)
        self._end_calls = end_calls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port, as `uvicorn.Server.startup` does."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit or self._loop is None:
            self.should_exit = True
        elif not self._stopping:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._stop)
        else:
            self.force_exit = True

    def _stop(self) -> None:
        self._end_calls()
        asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, self._leave)

    def _leave(self) -> None:
        self.force_exit = True


def serve(
    llm: LLM,
    settings: Settings,
    access: Access,
    bound: socket.socket,
    tls: Tls | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Serve a model until a signal ends it, or its engine cannot go on.

    Arguments:
    - `llm`: the model; it is closed at the end.
    - `bound`: of `bind`.
    - `prepare`: what takes long and comes before the port answers. All that can be wrong with the arguments
      is noticed before.

    Returns the exit code: 0 after a signal, 1 where the engine cannot go on.
    """

    def stop(_: Exception) -> None:
        server.should_exit = True

    bound.setsockopt(*_REUSED)
    with served(llm, settings, access, stop) as (app, service, engine):
        config = uvicorn.Config(
            app=app,
            http=_Protocol,
            ssl_certfile=tls and tls.certificate,
            ssl_keyfile=tls and tls.key,
            timeout_keep_alive=IDLE_SECONDS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            server_header=False,
            log_level="info",
            log_config=LOGGING,
            lifespan="off",
            access_log=False,
        )
        server = _Server(config, service.stop)
        config.load()
        prepare()
        settle()
        server.run(sockets=[bound])
    return 0 if engine.error is None else 1
