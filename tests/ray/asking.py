"""Requests that run beside a test, and the processes that answer them."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.api.sse import events
from tests.clients.servers import Server

LASTING = {"prompt": "123+456=", "gen_length": 96, "steps": 96, "block_length": 32, "early_stop": False}
"""A request of some seconds."""


class Asking(threading.Thread):
    """Asks a server for a completion.

    `status` and `text` are of the answer as far as it has come, and `error` what has broken it off.
    """

    def __init__(self, url: str, **body: Any):
        super().__init__(daemon=True)
        self._url, self._body = url, LASTING | body
        self.status, self.text = 0, ""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._url, timeout=120.0, trust_env=False) as client,
                client.stream("POST", "/v1/completions", json=self._body) as answer,
            ):
                self.status = answer.status_code
                for text in answer.iter_text():
                    self.text += text
        except httpx.TransportError as error:
            self.error = error

    @property
    def begun(self) -> bool:
        """Whether a part of the completion has come."""
        return '"text":"' in self.text

    def done(self) -> "Asking":
        """Wait for the end, which is not that of the connection."""
        self.join(150.0)
        assert not self.is_alive()
        assert self.error is None
        return self

    def completion(self) -> tuple[str, str | None]:
        """The text of the answer, and the code of the error that has ended a stream."""
        if not self._body.get("stream"):
            assert self.status == 200, self.text
            return json.loads(self.text)["choices"][0]["text"], None
        told = [data for _, data in events(self.text)]
        code = told.pop()["error"]["code"] if "error" in told[-1] else None
        return "".join(chunk["choices"][0]["text"] for chunk in told), code


def completed(server: Server, **body: Any) -> str:
    """The whole text of a completion."""
    return Asking(server.url, **body).done().completion()[0]


def replicas_of(pid: int) -> list[int]:
    """The processes of replicas that a process has started, itself or by others."""
    parents, named = {}, []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            found, command = int(directory.name), (directory / "cmdline").read_bytes()
            state = (directory / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[found] = int(state[1])
        if command.startswith(b"ray::ServeReplica:jdllm") and state[0] != "Z":
            named.append(found)

    def started(process: int) -> bool:
        return process == pid or (process in parents and started(parents[process]))

    return sorted(filter(started, named))


def cpu_seconds(pid: int) -> float:
    """The time of cores that a process has taken."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
