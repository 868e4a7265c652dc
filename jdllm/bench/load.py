"""Sends requests: so many at a time, or as they arrive, whether the server keeps up or not."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jdllm.bench.answers import Answer, BadAnswer
from jdllm.bench.client import Client
from jdllm.bench.form import Form
from jdllm.bench.records import Record, Status


class Ask(NamedTuple):
    """One request, ready to be sent.

    - `index`: its place in the order of arrival.
    - `body`: see `Form.body`.
    - `prompt_tokens`, `gen_length`: the tokens that it sends, and those that it asks for.
    - `steps`: the forward evaluations that it asks for, where it says so.
    """

    index: int
    body: bytes
    prompt_tokens: int
    gen_length: int
    steps: int | None


class Load:
    """Requests to one server, and what became of them.

    Arguments:
    - `client`: the server.
    - `form`: what the requests have in common.
    - `clock`: seconds, the one that the client has.
    - `told`: called with each record as its request ends.

    `records` has all requests that were sent, in the order of their ends. Times count from the call
    of `closed` or `open`. Where such a call is cancelled, so are the requests that are under way.
    """

    def __init__(
        self,
        client: Client,
        form: Form,
        clock: Callable[[], float],
        told: Callable[[Record], None] = lambda _: None,
    ):
        self._client, self._form, self._clock, self._told = client, form, clock, told
        self._start = 0.0
        self.records: list[Record] = []

    async def closed(self, asks: Iterable[Ask], concurrency: int) -> None:
        """Keep `concurrency` requests under way: the next one is due when one of them has ended."""
        self._start = self._clock()
        left = iter(asks)

        async def work() -> None:
            for ask in left:
                await self._send(ask, self._now())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def open(self, asks: Sequence[Ask], arrivals: Sequence[float]) -> None:
        """Send each request when it arrives, however many are under way.

        Arguments:
        - `arrivals`: seconds from now, one for each. Latencies count from them: a server that stalls, or a
          client that is late, makes requests slower, not fewer.
        """
        self._start = self._clock()
        async with asyncio.TaskGroup() as group:
            for ask, arrival in zip(asks, arrivals, strict=True):
                await asyncio.sleep(max(0.0, arrival - self._now()))
                group.create_task(self._send(ask, arrival))

    def _now(self) -> float:
        return self._clock() - self._start

    async def _send(self, ask: Ask, due: float) -> None:
        sent = self._now()
        try:
            answer = await self._client.generate(self._form, ask.body)
        except BadAnswer as e:
            self._keep(ask, due, sent, "failed", error=str(e))
        except asyncio.CancelledError:
            self._keep(ask, due, sent, "cancelled")
            raise
        else:
            self._keep(ask, due, sent, "completed", answer)

    def _keep(
        self,
        ask: Ask,
        due: float,
        sent: float,
        status: Status,
        answer: Answer | None = None,
        error: str | None = None,
    ) -> None:
        ended = self._now()
        told = answer or Answer(ask.prompt_tokens, 0, None, None)
        record = Record(
            index=ask.index,
            scheduled=due,
            sent=sent,
            ended=ended,
            prompt_tokens=told.prompt_tokens,
            asked_tokens=ask.gen_length,
            completion_tokens=told.completion_tokens,
            status=status,
            error=error,
            latency=ended - due,
            time_to_first_text=self._since(due, told.first_text),
            time_to_first_block=self._since(due, told.first_block),
            finish_reason=told.finish_reason,
            nfe=told.nfe,
            steps=ask.steps,
        )
        self.records.append(record)
        self._told(record)

    def _since(self, due: float, moment: float | None) -> float | None:
        return None if moment is None else moment - self._start - due
