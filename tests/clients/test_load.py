"""Many clients at a time: nothing is lost, nothing is left, and no answer depends on its company."""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from tests.clients.servers import Server

pytestmark = pytest.mark.clients

CACHES = ("none", "prefix", "dual", "selective", "sparse", "head_sparse")
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"transfer": "threshold", "threshold": 0.8},
    {"transfer": "factor"},
    {"transfer": "entropy_bound", "entropy_bound": 0.2},
    {"transfer": "margin"},
    {"remasking": "random"},
    {"alg": "entropy"},
)
Answer = list[tuple[Any, ...]]
"""What came of each choice."""

COMPANY = 200
SOAK = 2000
AT_A_TIME = 48


def mixed(count: int) -> list[dict[str, Any]]:
    """Requests of many lengths, caches, rules and temperatures, each with a seed."""
    rng = random.Random(21)
    bodies = []
    for seed in range(count):
        block = rng.choice((4, 8, 16))
        body = {
            "prompt": rng.choice((_sum, _sorting, _bytes))(rng),
            "max_tokens": block * rng.randrange(1, 5),
            "block_length": block,
            "cache": rng.choice(CACHES),
            "temperature": rng.choice((0, 0, 0.7, 1.5)),
            "seed": seed,
            "ignore_eos": rng.random() < 0.3,
        }
        body |= rng.choice(RULES)
        if "alg" in body and body["cache"] == "none":
            del body["block_length"]  # Dream's own sampler has no blocks
        bodies.append(body)
    return bodies


def _sum(rng: random.Random) -> str:
    return f"{rng.randrange(1000)}+{rng.randrange(1000)}="


def _sorting(rng: random.Random) -> str:
    return "sort: " + " ".join(str(rng.randrange(10)) for _ in range(rng.randrange(2, 9)))


def _bytes(rng: random.Random) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randrange(1, 200))]


def client_of(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_A_TIME)
    return httpx.AsyncClient(
        base_url=server.url, headers=server.headers, timeout=300.0, limits=limits, trust_env=False
    )


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, (body, answer.text)
    return [
        (choice["text"], choice["token_ids"], choice["finish_reason"], choice["nfe"])
        for choice in answer.json()["choices"]
    ]


def test_an_answer_does_not_depend_on_its_company(server: Server):
    bodies = mixed(COMPANY)

    async def both() -> None:
        async with client_of(server) as client:
            together = await asyncio.gather(*(ask(client, body) for body in bodies))
            for body, answer in zip(bodies, together, strict=True):
                assert await ask(client, body) == answer, body

    asyncio.run(both())
    server.settle()


class Soak:
    """Short requests, many of which are left before their end.

    Arguments:
    - `expected`: what is asked, and what comes of it.
    """

    def __init__(self, client: httpx.AsyncClient, expected: Sequence[tuple[dict[str, Any], Answer]]):
        self._client, self._expected = client, expected
        self._rng = random.Random(7)
        self.answered = self.left = 0

    async def run(self, count: int) -> None:
        """Ask so often, `AT_A_TIME` at a time."""
        todo = iter(range(count))

        async def work() -> None:
            for _ in todo:
                act = self._rng.choice((self._wait, self._wait, self._leave, self._give_up, self._cancel))
                await act(*self._rng.choice(self._expected))

        await asyncio.gather(*(work() for _ in range(AT_A_TIME)))

    async def _wait(self, body: dict[str, Any], expected: Answer) -> None:
        assert await ask(self._client, body) == expected
        self.answered += 1

    async def _leave(self, body: dict[str, Any], _: Answer) -> None:
        """Close the connection after the first part of a stream."""
        async with self._stream(body) as answer:
            async for _part in answer.aiter_bytes():
                break
        self.left += 1

    async def _give_up(self, body: dict[str, Any], _: Answer) -> None:
        """Close the connection after some time, whatever the server does then."""
        try:
            await asyncio.wait_for(ask(self._client, body), self._rng.uniform(0.0, 0.3))
        except TimeoutError:
            self.left += 1

    async def _cancel(self, body: dict[str, Any], _: Answer) -> None:
        """Have the call ended from outside, and read what the stream says of it."""
        async with self._stream(body | {"stream_mode": "denoise"}) as answer:
            lines = answer.aiter_lines()
            datas = (line.removeprefix("data: ") async for line in lines if line.startswith("data: "))
            call = json.loads(await anext(datas))["id"]
            deleted = await self._client.delete(f"/v1/requests/{call}")
            told = [data async for data in datas]
        assert deleted.status_code in (200, 404)
        assert told[-1] == "[DONE]"
        self.left += deleted.status_code == 200

    def _stream(self, body: dict[str, Any]) -> AbstractAsyncContextManager[httpx.Response]:
        return self._client.stream("POST", "/v1/completions", json=body | {"stream": True})


def test_a_soak_leaves_nothing_behind(server: Server):
    bodies = [{**body, "max_tokens": body.get("block_length", 4)} for body in mixed(20)]

    async def soak() -> None:
        async with client_of(server) as client:
            soak = Soak(client, [(body, await ask(client, body)) for body in bodies])
            await soak.run(SOAK // 2)  # the allocator's arenas grow at first
            before = server.resident
            await soak.run(SOAK // 2)
            assert server.resident - before < 48 << 20
        assert soak.answered > SOAK // 4
        assert soak.left > SOAK // 4

    with server.client() as client:
        failed = client.get("/v1/stats").json()["failed"]
        asyncio.run(soak())
        server.settle()
        assert client.get("/v1/stats").json()["failed"] == failed
