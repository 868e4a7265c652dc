import asyncio
from collections.abc import AsyncGenerator

import pytest
from fastapi.testclient import TestClient

from jdllm.api import answers
from jdllm.api.answers import PING, kept_alive
from jdllm.api.app import create_app
from jdllm.api.service import Service
from tests.api.sse import events
from tests.api.undriven import stop_once_asked, undriven


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SILENT_SECONDS", 0.02)


def test_silence_is_filled_and_nothing_is_lost():
    async def slow() -> AsyncGenerator[bytes]:
        for n in range(3):
            yield b"%d" % n
            await asyncio.sleep(0.1)

    async def main() -> list[bytes]:
        return [event async for event in kept_alive(slow())]

    found = asyncio.run(main())
    assert [event for event in found if event != PING] == [b"0", b"1", b"2"]
    for n in range(2):
        assert found[found.index(b"%d" % n) + 1] == PING


def test_errors_come_through():
    async def broken() -> AsyncGenerator[bytes]:
        yield b"0"
        raise ZeroDivisionError

    async def main() -> None:
        async for _ in kept_alive(broken()):
            pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_who_leaves_ends_what_is_awaited():
    ended = []

    async def endless() -> AsyncGenerator[bytes]:
        try:
            yield b"0"
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main() -> None:
        kept = kept_alive(endless())
        assert [await anext(kept), await anext(kept)] == [b"0", PING]
        await kept.aclose()

    asyncio.run(main())
    assert ended == [True]


@pytest.mark.parametrize(
    ("path", "further"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"stream_mode": "denoise"}),
        ("/v1/chat/completions", {}),
        ("/v1/responses", {}),
        ("/v1/infill", {"parts": ["1+", {"type": "text", "max_tokens": 2}]}),
    ],
)
def test_every_stream_is_kept_alive(service: Service, path: str, further: dict):
    texts = {"prompt": "1+", "input": "1+", "messages": [{"role": "user", "content": "1+"}]}
    own = {"completions": "prompt", "responses": "input", "infill": "parts"}
    name = "messages" if "chat" in path else own[path.rpartition("/")[2]]
    with undriven(service) as waiting, TestClient(create_app(waiting)) as client:
        assert client.portal is not None
        client.portal.start_task_soon(stop_once_asked, waiting, 0.2)
        answer = client.post(path, json={name: (texts | further)[name], "stream": True} | further)
    assert PING.decode() in answer.text
    assert path == "/v1/responses" or events(answer.text)
