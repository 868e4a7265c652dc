"""A call in the engine: its updates, its outputs and its end, however that comes."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Self

import fastapi

from jdllm.api.answers import prompt_tokens
from jdllm.api.errors import ApiError, as_api_error, dead
from jdllm.api.metrics import Metrics
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.outputs import CompletionOutput, RequestOutput, generated, request_output
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


class CallEnd(NamedTuple):
    """What monitoring is told of a call that has ended.

    - `id`: of the call.
    - `prompt_tokens`, `completion_tokens`: that were read, and that were generated.
    - `evaluations`: forward evaluations of its samples that ended.
    - `queued`: seconds until the first of these started, `None` where none has ended.
    - `first_block`: seconds until the first tokens of these were committed, `None` where none were.
    - `seconds`: that the call took.
    """

    id: str
    prompt_tokens: int
    completion_tokens: int
    evaluations: int
    queued: float | None
    first_block: float | None
    seconds: float


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
    - `began`: the moment of `time.monotonic` before it was submitted.

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
        began: float,
    ):
        self.id, self.owner, self.asked, self._request = id, owner_of(request), asked, request
        self.created = int(time.time())
        self._began = began
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
        return time.monotonic() - self._began

    def watch(self, timeout: float | None, timed_out: ApiError) -> None:
        """End it when the client goes or the time is over."""
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._until_gone())
        if timeout is not None:
            self._timeout = loop.call_later(timeout, self.end, timed_out)

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.end(_gone())

    def end(self, error: ApiError) -> None:
        """Let whoever iterates see `error` next."""
        self._submitted.end(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._submitted.close()
        end = self._summary()
        # Who leaves a stream may cancel it before the call is ended.
        failed = error if error is None or isinstance(error, ApiError) else _gone()
        self._metrics.request_ended(
            self._request.url.path,
            200 if failed is None else failed.status,
            end.seconds,
            end.first_block,
            end.prompt_tokens,
            end.completion_tokens,
        )
        self._request.state.call = end
        if failed is not None:
            self._request.state.error = failed
        for waiting in (self._watching, self._timeout):
            if waiting is not None:
                waiting.cancel()
        self._calls.pop(self.id, None)

    def _summary(self) -> CallEnd:
        states = self._ended.values()
        firsts = [state.committed - state.created for state in states if state.committed is not None]
        return CallEnd(
            id=self.id,
            prompt_tokens=prompt_tokens(self.asked),
            completion_tokens=sum(map(generated, states)),
            evaluations=sum(state.steps for state in states),
            queued=min((state.timings().queued for state in states), default=None),
            first_block=min(firsts, default=None),
            seconds=self.seconds,
        )

    async def __aiter__(self) -> AsyncIterator[Told]:
        """The updates of all samples; raises `ApiError` where one fails or it is ended."""
        try:
            async for update in self._submitted:
                choice = update.request
                if isinstance(update, Ended):
                    if update.error is not None:
                        raise update.error
                    self._ended[choice] = update.state
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


def _gone() -> ApiError:
    return ApiError(_CLIENT_GONE, "the client has gone", code="client_gone")


def owner_of(request: fastapi.Request) -> int | None:
    """The number of the key that a request came with, `None` where none is needed or it is the admin's."""
    return getattr(request.state, "owner", None)


def call_id(prefix: str) -> str:
    """An id for a call that no other has."""
    return f"{prefix}-{uuid.uuid4().hex}"
