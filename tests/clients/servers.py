"""Servers of the bundled model, each in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

ROWS = 512
MODEL = "jdllm-demo"
LONG = {"gen_length": 480, "steps": 480, "block_length": 32, "early_stop": False}
"""Sampling of a request that fills a step alone, and takes as many of them as it can."""

_OPTIONS = (
    *("--port", "0", "--dtype", "float32", "--max-num-batched-tokens", str(ROWS)),
    *("--kv-pool", "128MiB", "--warmup"),
)
_READY_SECONDS = 600.0
"""A busy machine, where nothing has been compiled before."""


class Server:
    """A process of `jdllm serve` on a port of its own.

    - `url`: where it answers, once `ready` has returned.
    - `api_key`: that it asks for, `None` where it asks for none.
    - `pid`: of its process.
    - `log`: the file of what it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, api_key: str | None):
        self.process, self.log, self.api_key = process, log, api_key
        self.pid = process.pid
        self.url = ""

    @property
    def headers(self) -> dict[str, str]:
        """What lets a request pass."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def client(self, **options: Any) -> httpx.Client:
        """A client of it that sends the key; `options` as of `httpx.Client`."""
        settings = {"base_url": self.url, "headers": self.headers, "timeout": 120.0, "trust_env": False}
        return httpx.Client(**settings | options)

    def ready(self) -> "Server":
        """Wait until it serves."""
        until(lambda: self._announced() is not None or not self.alive, _READY_SECONDS)
        announced = self._announced()
        assert announced is not None, self.log.read_text()
        self.url = announced
        with self.client(verify=False) as client:
            until(lambda: self._healthy(client) or not self.alive, 60.0)
        assert self.alive, self.log.read_text()
        return self

    def _announced(self) -> str | None:
        found = re.search(r" at (https?://\S+:\d+)$", self.log.read_text(), re.MULTILINE)
        return found and found[1]

    def _healthy(self, client: httpx.Client) -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def resident(self) -> int:
        """Bytes of memory that it has."""
        found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until its engine holds no request and no page of the pool."""
        with self.client() as client:

            def idle() -> bool:
                stats = client.get("/v1/stats").json()
                return (stats["waiting"], stats["running"], stats["free_pages"]) == (0, 0, stats["pages"])

            until(idle, seconds)
            assert not client.get("/v1/requests").json()["data"]

    def end(self) -> int:
        """Stop it at once; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.alive:
                self.process.send_signal(number)
                try:
                    return self.process.wait(10.0)
                except subprocess.TimeoutExpired:
                    continue
        return self.process.wait()


class Starter:
    """Starts servers, and ends them all with `end`.

    Arguments:
    - `directory`: for their logs.
    - `caches`: where they keep executables for each other.
    """

    def __init__(self, directory: Path, caches: Path):
        self._directory = directory
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "JDLLM_API_KEY"},
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(caches),
        }
        self._started: list[Server] = []

    def __call__(
        self,
        *options: str,
        api_key: str | None = None,
        program: Sequence[str] = ("-m", "jdllm"),
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        """Start a server.

        Arguments:
        - `options`: further ones of `jdllm serve`.
        - `api_key`: that it asks for.
        - `program`: what Python runs.
        - `environment`: further variables.

        Returns it before it is ready.
        """
        log = self._directory / f"server-{len(self._started)}.log"
        given = {"JDLLM_API_KEY": api_key} if api_key else {}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *program, "serve", *_OPTIONS, *options],
                env={**self._environment, **given, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._started.append(Server(process, log, api_key))
        return self._started[-1]

    def end(self) -> None:
        """End all that is left."""
        for server in self._started:
            server.end()


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition; fails where it takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
