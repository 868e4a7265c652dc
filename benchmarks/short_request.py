"""How long a short request takes beside long ones that have no cache, over HTTP."""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cases import case_parser
from benchmarks.record import print_row, record
from benchmarks.serving import served
from jdllm.demo import checkpoint_path

PROMPT = "123+456="
SHORT = {"prompt": PROMPT, "max_tokens": 8, "steps": 8, "block_length": 8, "early_stop": False}
FACTOR = 3
"""A short request takes at most so many times what it takes alone, and a step of the longest besides."""

_CACHES = ("none", "dual")
_PATIENCE = 600.0


class Client:
    """Asks a server for completions.

    Arguments:
    - `url`: of the server.
    - `tokens`: of the sequence of a long request, its prompt included.
    """

    def __init__(self, url: str, tokens: int):
        self._url = f"{url}/v1/completions"
        generated = tokens - len(PROMPT)
        self._long = {"prompt": PROMPT, "max_tokens": generated, "block_length": generated}

    def seconds_of(self, body: dict[str, Any]) -> float:
        """What a whole answer takes."""
        start = time.perf_counter()
        httpx.post(self._url, json=body, timeout=_PATIENCE).raise_for_status()
        return time.perf_counter() - start

    def step_of_long(self) -> float:
        """What a step of a long request takes alone: what two steps take more than one."""
        bodies = [self._long | {"steps": steps, "early_stop": False} for steps in (1, 2)]
        one, two = (min(self.seconds_of(body) for _ in range(3)) for body in bodies)
        return two - one

    @contextlib.contextmanager
    def beside(self, count: int) -> Iterator[None]:
        """So many long requests run; they are given up at the end."""
        body = self._long | {"steps": self._long["max_tokens"], "early_stop": False, "stream": True}
        over = threading.Event()

        def stream(seed: int) -> None:
            with httpx.stream("POST", self._url, json=body | {"seed": seed}, timeout=_PATIENCE) as answer:
                for _ in answer.iter_lines():
                    if over.is_set():
                        return

        threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


def shorts(client: Client, cache: str, count: int) -> list[float]:
    """Seconds of so many short requests, one after the other."""
    return [client.seconds_of(SHORT | {"cache": cache}) for _ in range(count)]


def main(arguments: Sequence[str]) -> None:
    """Ask the bundled model, served with defaults, for 8 tokens beside nine requests of 1,000 tokens.

    `python3 -m benchmarks short_request [--long 9] [--tokens 1000] [--repeats 10]`. `alone_s` and `beside_s`
    are medians, `worst_s` is the longest beside the others, and `bound_s` is three times `alone_s` and a step
    of a long request.
    """
    parser = case_parser("short_request", main.__doc__)
    parser.add_argument("--long", type=int, default=9, help="how many long requests run")
    parser.add_argument("--tokens", type=int, default=1000, help="of the sequence of each of them")
    parser.add_argument("--repeats", type=int, default=10, help="short requests of each kind")
    args = parser.parse_args(arguments)
    table = []
    with tempfile.TemporaryDirectory() as cache, served(checkpoint_path(), None, Path(cache)) as server:
        client = Client(server["url"], args.tokens)
        alone = {}
        for name in _CACHES:
            shorts(client, name, 2)  # compiles
            alone[name] = statistics.median(shorts(client, name, args.repeats))
        step = client.step_of_long()
        with client.beside(args.long):
            for name in _CACHES:
                shorts(client, name, 2)
                found = shorts(client, name, args.repeats)
                bound = FACTOR * alone[name] + step
                row = {"cache": name, "alone_s": alone[name], "beside_s": statistics.median(found)}
                table.append(row | {"worst_s": max(found), "step_of_long_s": step, "bound_s": bound})
                print_row(table[-1])
    record("short_request_demo", table, args.out, long=args.long, tokens=args.tokens)
