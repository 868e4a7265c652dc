"""A server as a client sees it: HTTP/1.1 over one pool of connections."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from jdllm.bench.answers import Answer, BadAnswer, Stream, error_message, read_whole
from jdllm.bench.events import EventParser
from jdllm.bench.form import Form
from jdllm.errors import RequestError

_CONNECTING = 10.0
"""Seconds to a connection. An answer may take as long as it takes."""
_IDLE = 2.0
"""Seconds after which a connection is not used again: servers close idle ones, uvicorn after 5."""


class Client:
    """Connections to one server; a context that closes them.

    Arguments:
    - `url`: of the server, without a path.
    - `api_key`: sent as a bearer token.
    - `clock`: seconds, for what streams tell of.

    Raises `RequestError` for a URL or a key that cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None, clock: Callable[[], float]):
        self._url, self._clock = url.rstrip("/"), clock
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE)
        try:
            # A transport of its own takes no proxy out of the environment: times are the server's alone.
            self._http = httpx.AsyncClient(
                base_url=self._url,
                headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                timeout=httpx.Timeout(None, connect=_CONNECTING),
                transport=httpx.AsyncHTTPTransport(limits=limits),
            )
        except (httpx.InvalidURL, UnicodeError) as e:
            raise RequestError(f"--url or --api-key cannot be sent: {e}") from None
        if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
            raise RequestError(f"--url is {url!r}, expected such as http://127.0.0.1:8000")

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def models(self) -> list[str]:
        """The names of the models that are served; raises `RequestError` where the server does not say."""
        listed = (await self._get("/v1/models")).get("data")
        entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        names = [entry["id"] for entry in entries if isinstance(entry.get("id"), str)]
        if not names:
            raise RequestError(f"{self._url}/v1/models lists no model")
        return names

    async def tokenizer_info(self) -> dict[str, Any]:
        """What GET /tokenizer_info answers; raises `RequestError` where the server does not say."""
        return await self._get("/tokenizer_info")

    async def stats(self) -> dict[str, Any] | None:
        """What GET /v1/stats answers, `None` where the server has no such thing."""
        try:
            return await self._get("/v1/stats")
        except RequestError:
            return None

    async def text(self, ids: Sequence[int]) -> str:
        """The text of ids; raises `RequestError` where the server does not say."""
        text = (await self._json("POST", "/detokenize", {"tokens": list(ids)})).get("prompt")
        if not isinstance(text, str):
            raise RequestError(f"{self._url}/detokenize answers no text 'prompt'")
        return text

    async def generate(self, form: Form, body: bytes) -> Answer:
        """The answer to one request; raises `BadAnswer` for what does not count as one, of any cause."""
        path = "/v1/chat/completions" if form.endpoint == "chat" else "/v1/completions"
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            async with self._http.stream("POST", path, content=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise BadAnswer(_refusal(response.status_code, await response.aread()))
                if form.stream is None:
                    return read_whole(await response.aread())
                return await self._read(response, form.reader())
        except httpx.HTTPError as e:
            raise BadAnswer(f"{type(e).__name__}: {e}".removesuffix(": ")) from None
        except (AttributeError, LookupError, TypeError, ValueError) as e:
            raise BadAnswer(f"the answer has another shape: {type(e).__name__}: {e}") from None

    async def _read(self, response: httpx.Response, reader: Stream) -> Answer:
        parser = EventParser()
        async for piece in response.aiter_raw():
            now = self._clock()
            for event in parser.feed(piece):
                reader.take(event, now)
        return reader.answer()

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._json("GET", path, None)

    async def _json(self, method: str, path: str, body: object) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as e:
            raise RequestError(f"there is no server at {self._url}: {e or type(e).__name__}") from None
        if response.status_code != httpx.codes.OK:
            refusal = _refusal(response.status_code, response.content)
            hint = " (--api-key)" if response.status_code == httpx.codes.UNAUTHORIZED else ""
            raise RequestError(f"{self._url}{path} answers {refusal}{hint}")
        try:
            values = response.json()
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise RequestError(
                f"{self._url}{path} answers something else than a JSON object: is it a server?"
            )
        return values


def _refusal(status: int, body: bytes) -> str:
    return f"HTTP {status}: {error_message(body)}".removesuffix(": ")
