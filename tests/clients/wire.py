"""HTTP as bytes on a connection, for what no client library would send."""

import json
import socket
import struct
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.clients.servers import Server


class Answer(NamedTuple):
    """An answer as it came: empty and 0 where the connection was closed without one."""

    status: int
    head: str
    body: bytes


def connect(server: Server, timeout: float = 90.0) -> socket.socket:
    """A connection to it."""
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout)


def head(server: Server, length: int | str, path: str = "/v1/completions", *further: str) -> bytes:
    """The head of a POST with a body of so many bytes, or "chunked"."""
    size = "Transfer-Encoding: chunked" if length == "chunked" else f"Content-Length: {length}"
    own = [f"{name}: {value}" for name, value in server.headers.items()]
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        size,
        *own,
        *further,
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(server: Server, body: dict[str, Any], *further: str) -> bytes:
    """A whole POST of a completion."""
    data = json.dumps(body).encode()
    return head(server, len(data), "/v1/completions", *further) + data


def read(connection: socket.socket) -> Answer:
    """What comes until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass  # it closed while we were still sending
    status, _, rest = b"".join(parts).partition(b"\r\n")
    fields, _, body = rest.partition(b"\r\n\r\n")
    return Answer(int(status.split()[1]) if status else 0, fields.decode("latin-1"), body)


def reset(connection: socket.socket) -> None:
    """Close it without a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def check_refusal(status: int, body: bytes) -> dict[str, Any]:
    """The error of an answer that blames the client, in OpenAI's shape."""
    assert 400 <= status < 500, (status, body[:500])
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error
