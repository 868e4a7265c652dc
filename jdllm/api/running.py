"""A call in the engine: its updates, its outputs and its end, however that comes."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Self

import fastapi
import numpy as np

from jdllm.api.answers import prompt_tokens
from jdllm.api.errors import ApiError, as_api_error, dead
from jdllm.api.metrics import Metrics
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.outputs import CompletionOutput, RequestOutput, request_output
from jdllm.prompts import AskedPrompt
from jdllm.serving.async_engine import AsyncEngine
from jdllm.serving.request import Request
from jdllm.serving.submitted import Submitted
from jdllm.serving.updates import Ended, Update

_CLIENT_GONE = 499
"""The status, which nobody receives, of a request whose client has gone."""


class Told(NamedTuple):
    """An update of one sample of a call; `choice` counts the samples over all its prompts."""

    choice: int
    update: Update


class Running:
    """A call in the engine; iterate over it once, inside `with`.

    Arguments:
    - `id`: of the call.
    - `request`: of HTTP.
    - `asked`: what its prompts ask for.
    - `submitted`: its requests in the engine.
    - `engine`: which they are submitted to.
    - `metrics`: count its end.
    - `tokenizer`: of the model; without one the outputs have no texts.
    - `calls`: the waiting and running calls, by id. The call is among them until its end.

    `owner` is the number of the key that the call came with; `None` without keys, and for the admin's key.
    """

    def __init__(
        self,
        id: str,
        request: fastapi.Request,
        asked: Sequence[AskedPrompt],
        submitted: Submitted,
        *,
        engine: AsyncEngine,
        metrics: Metrics,
        tokenizer: Tokenizer | None,
        calls: "dict[str, Running]",
    ):
        self.id, self.owner, self.asked, self._request = id, owner_of(request), asked, request
        self.created = int(time.time())
        self.first_block: float | None = None
        self._started = time.monotonic()
        self._submitted, self._engine, self._metrics, self._tokenizer = submitted, engine, metrics, tokenizer
        self._calls = calls
        calls[id] = self
        self._watching: asyncio.Task[None] | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._ended: dict[int, Request] = {}

    @property
    def requests(self) -> Sequence[int]:
        """Ids of its requests in the engine."""
        return self._submitted.ids

    @property
    def seconds(self) -> float:
        """Since it was submitted."""
        return time.monotonic() - self._started

    def watch(self, timeout: float | None, timed_out: ApiError) -> None:
        """End it when the client goes or the time is over."""
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._until_gone())
        if timeout is not None:
            self._timeout = loop.call_later(timeout, self.end, timed_out)

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.end(ApiError(_CLIENT_GONE, "the client has gone", code="client_gone"))

    def end(self, error: ApiError) -> None:
        """Let whoever iterates see `error` next."""
        self._submitted.end(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._submitted.close()
        read = prompt_tokens(self.asked)
        made = sum(int(np.count_nonzero(state.committed_in >= 0)) for state in self._ended.values())
        status = 200 if error is None else error.status if isinstance(error, ApiError) else _CLIENT_GONE
        endpoint = self._request.url.path
        self._metrics.request_ended(endpoint, status, self.seconds, self.first_block, read, made)
        self._request.state.counts = read, made
        if isinstance(error, ApiError):
            self._request.state.error = error
        for waiting in (self._watching, self._timeout):
            if waiting is not None:
                waiting.cancel()
        self._calls.pop(self.id, None)

    async def __aiter__(self) -> AsyncIterator[Told]:
        """The updates of all samples; raises `ApiError` where one fails or it is ended."""
        try:
            async for update in self._submitted:
                choice = update.request
                if isinstance(update, Ended):
                    if update.error is not None:
                        raise update.error
                    self._ended[choice] = update.state
                elif self.first_block is None and update.committed.any():
                    self.first_block = self.seconds
                yield Told(choice, update)
        except Exception as error:
            if self._engine.error is not None:
                raise dead(self._engine.error) from None
            raise as_api_error(error) from None

    def ended(self, choice: int) -> Request:
        """A sample as it ended."""
        return self._ended[choice]

    def sample(self, choice: int) -> CompletionOutput:
        """The output of a sample that has ended."""
        return self._output(None, 0, [self._ended[choice]]).outputs[0]

    def outputs(self) -> list[RequestOutput]:
        """One for each prompt, once all is over."""
        made, first = [], 0
        for one in self.asked:
            states = [self._ended[first + i] for i in range(len(one.specs))]
            made.append(self._output(one.text, one.seed, states))
            first += len(one.specs)
        return made

    def _output(self, text: str | None, seed: int, states: list[Request]) -> RequestOutput:
        decode = None if self._tokenizer is None else self._tokenizer.decode
        return request_output(text, seed, states, decode)

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end; then as `outputs`. Raises as iterating does."""
        async for _ in self:
            pass
        return self.outputs()


def owner_of(request: fastapi.Request) -> int | None:
    """The number of the key that a request came with, `None` where none is needed or it is the admin's."""
    return getattr(request.state, "owner", None)


def call_id(prefix: str) -> str:
    """An id for a call that no other has."""
    return f"{prefix}-{uuid.uuid4().hex}"
