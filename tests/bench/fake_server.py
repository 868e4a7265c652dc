"""A server that generates nothing: it speaks the API on loopback, as slowly and as badly as a test wants."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

VOCAB_SIZE = 100
MASK_ID = 7
BLOCK = 4
DEFAULT_BLOCKS = 2

Fault = Callable[[int], str | None]


class FakeServer:
    """Answers generations in blocks of `BLOCK` tokens, all of them "ab".

    - `block_seconds`: how long a block takes.
    - `capacity`: generations at a time; others wait.
    - `fault`: what goes wrong with a generation, from its number: "refuse", "crash", "drop", "error",
      "endless" (no [DONE]), "uncounted" (no usage), "short" (a token less) or `None`.
    - `key`, `tokenizer`: a key that it wants, and whether it knows a tokenizer.
    - `bodies`, `authorizations`: what came to the generations, in order.
    - `most`: the most generations that were there at a time.
    """

    def __init__(self):
        self.block_seconds = 0.0
        self.capacity = 10_000
        self.fault: Fault = lambda _: None
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.here = self.most = self.evaluated = 0
        self.key: str | None = None
        self.tokenizer = True
        self._slots: asyncio.Semaphore | None = None
        self.url = ""

    async def generate(self, request: Request, chat: bool) -> Response:
        number, body = len(self.bodies), await request.json()
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        fault = self.fault(number)
        if fault == "refuse":
            return _error(429, "the queue is full")
        if fault == "crash":
            return PlainTextResponse("Internal Server Error", 500)
        if body.get("stream"):
            write = _denoised if body.get("stream_mode") == "denoise" else _written
            events = write(self._blocks(body), body, chat, fault)
            return StreamingResponse(events, media_type="text/event-stream")
        async for _ in self._blocks(body):
            pass
        text = {"message": {"content": "ab"}} if chat else {"text": "ab"}
        choice = {"index": 0, "finish_reason": "length", "nfe": body["max_tokens"], **text}
        usage = {} if fault == "uncounted" else {"usage": _usage(body, body["max_tokens"])}
        return JSONResponse({"choices": [choice], **usage})

    async def _blocks(self, body: dict[str, Any]) -> AsyncIterator[int]:
        """Yields where each block begins, when it is done."""
        self.here += 1
        self.most = max(self.most, self.here)
        self._slots = self._slots or asyncio.Semaphore(self.capacity)
        try:
            async with self._slots:
                for start in range(0, body["max_tokens"], BLOCK):
                    await asyncio.sleep(self.block_seconds)
                    self.evaluated += BLOCK
                    yield start
        finally:
            self.here -= 1


def _prompt_tokens(body: dict[str, Any]) -> int:
    return len(body["prompt"]) if "prompt" in body else len(body["messages"][0]["content"].split()) + 3


def _usage(body: dict[str, Any], done: int) -> dict[str, int]:
    read = _prompt_tokens(body)
    return {
        "prompt_tokens": read,
        "completion_tokens": done,
        "total_tokens": read + done,
        "forward_evaluations": done,
    }


def _error(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers={"Retry-After": "1"})


async def _written(
    blocks: AsyncIterator[int], body: dict[str, Any], chat: bool, fault: str | None
) -> AsyncIterator[str]:
    """OpenAI's chunks. The first text of a block comes before its end."""

    def chunk(told: int, text: str, **more: Any) -> str:
        place = {"delta": {"content": text}} if chat else {"text": text}
        data: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": None, **place, **more}]}
        if fault != "uncounted":
            data["usage"] = _usage(body, told)
        return f"data: {json.dumps(data)}\n\n"

    length = body["max_tokens"] - (fault == "short")
    if chat:
        yield chunk(0, "")
    async for start in blocks:
        yield chunk(start + 1, "a")
        yield chunk(min(start + BLOCK, length), "b")
        if fault == "drop":
            raise RuntimeError("dropped on purpose")
        if fault == "error":
            yield 'data: {"error": {"message": "a step failed"}}\n\ndata: [DONE]\n\n'
            return
    yield chunk(length, "", finish_reason="length")
    if fault != "endless":
        yield "data: [DONE]\n\n"


async def _denoised(
    blocks: AsyncIterator[int], body: dict[str, Any], chat: bool, fault: str | None
) -> AsyncIterator[str]:
    """Two steps a block: the first commits one token, the second all others."""

    def event(name: str, data: dict[str, Any]) -> str:
        return f"event: {name}\ndata: {json.dumps(data)}\n\n"

    first, length = _prompt_tokens(body), body["max_tokens"]
    places = [[first + at, first + at + BLOCK] for at in range(0, length, BLOCK)]
    yield event("start", {"index": 0, "start": first, "stop": first + length, "blocks": places})
    async for start in blocks:
        positions = [*range(first + start, first + start + BLOCK)]
        yield event("step", {"index": 0, "positions": positions, "committed": [True, False, False, False]})
        if fault == "error":
            yield event("error", {"error": {"message": "a step failed"}}) + "data: [DONE]\n\n"
            return
        yield event("step", {"index": 0, "positions": positions[1:], "committed": [True] * (BLOCK - 1)})
    end = {"index": 0, "finish_reason": "length", "nfe": length // 2, "usage": _usage(body, length)}
    yield event("end", end)
    yield "data: [DONE]\n\n"


def _app(server: FakeServer) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await server.generate(request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await server.generate(request, chat=True)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if server.key is not None and request.headers.get("authorization") != f"Bearer {server.key}":
            return _error(401, "there is no such key")
        return JSONResponse({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        if not server.tokenizer:
            return _error(400, "the model has no tokenizer")
        return JSONResponse({"vocab_size": VOCAB_SIZE, "mask_token": "<m>", "mask_token_id": MASK_ID})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return JSONResponse({"prompt": " ".join(f"w{i}" for i in (await request.json())["tokens"])})

    @app.get("/v1/stats")
    async def stats() -> Response:
        rows = {"full": 10 * server.evaluated, "reuse": 0}
        return JSONResponse(
            {"waiting": 0, "pages": 5, "evaluated": server.evaluated, "rows": rows, "compiled": 3}
        )

    return app


@contextlib.contextmanager
def serving() -> Iterator[FakeServer]:
    """A fake server in a thread, until the end of the context."""
    fake = FakeServer()
    listening = socket.create_server(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(_app(fake), ws="none", lifespan="off", log_level=100, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
