"""A run: what is asked of whom, the requests of it, and their records."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jdllm.bench.client import Client
from jdllm.bench.form import Endpoint, Form, StreamMode
from jdllm.bench.load import Ask, Load
from jdllm.bench.records import Record
from jdllm.bench.trace import Trace
from jdllm.bench.workload import Lengths, draw_prompts, poisson_arrivals
from jdllm.errors import RequestError

_GAUGES = frozenset({"waiting", "running", "pages", "free_pages"})
"""What the server has now; all else that it tells counts from its start."""


class Options(NamedTuple):
    """What a run is to do.

    - `url`, `api_key`: the server.
    - `model`: its name there, `None` for the first that the server lists.
    - `endpoint`: the route to ask.
    - `stream`: how the answer is streamed; `None` for an answer in one piece.
    - `requests`, `warmup`: timed requests, and untimed requests before them.
    - `lengths`, `gen_length`: of the prompts and of the answers.
    - `sampling`: further fields of the requests; `steps` are those of `gen_length` tokens.
    - `seed`: of lengths, prompts and arrivals.
    - `rate`: of Poisson arrivals, in requests a second.
    - `trace`: when the requests arrive, and what each generates, in place of `rate` and `gen_length`. A load
      without `rate` and `trace` is a closed loop.
    - `concurrency`: of a closed loop, `None` for all requests at once.
    - `vocab_size`: `None` asks the server.
    """

    url: str
    api_key: str | None
    model: str | None
    endpoint: Endpoint
    stream: StreamMode | None
    requests: int
    warmup: int
    lengths: Lengths
    gen_length: int
    sampling: Mapping[str, Any]
    seed: int
    rate: float | None
    concurrency: int | None
    vocab_size: int | None
    trace: Trace | None = None

    def arrivals(self) -> list[float] | None:
        """Seconds at which the requests arrive, `None` in a closed loop."""
        if self.trace is not None:
            return self.trace.times
        return None if self.rate is None else poisson_arrivals(self.rate, self.requests, self.seed)

    def gen_lengths(self, count: int) -> list[int]:
        """Tokens that each of the first `count` requests generates. Those of a trace are cycled."""
        lengths = [self.gen_length] if self.trace is None else self.trace.gen_lengths(self.gen_length)
        return list(itertools.islice(itertools.cycle(lengths), count))


class Run(NamedTuple):
    """What became of a run.

    - `model`: that was asked.
    - `records`: of the requests that were sent.
    - `interrupted`: whether it was cancelled before its end.
    - `server`: by how much the server's own counters grew, where it has any and the run came to its end. They
      count the requests of others too.
    """

    model: str
    records: list[Record]
    interrupted: bool
    server: dict[str, Any] | None


async def run(options: Options, told: Callable[[Record], None] = lambda _: None) -> Run:
    """Put a load on a server.

    Arguments:
    - `told`: called with each record as its request ends.

    Once the load has begun, being cancelled ends it, and the run has what there is. Raises `RequestError`
    where there is no such server, or it does not say what is needed; what goes wrong later is recorded.
    """
    clock = time.perf_counter
    async with Client(options.url, options.api_key, clock) as client:
        form = await _form(client, options)
        asks = await _asks(client, form, options)
        timed, untimed = asks[: options.requests], asks[options.requests :]
        if untimed:
            await Load(client, form, clock).closed(untimed, options.concurrency or len(untimed))
        before = await client.stats()
        load = Load(client, form, clock, told)
        interrupted = not await _completed(load, timed, options)
        after = None if interrupted else await client.stats()
    server = _growth(before, after) if before and after else None
    return Run(form.model, load.records, interrupted, server)


async def _completed(load: Load, asks: list[Ask], options: Options) -> bool:
    """Whether the load came to its end before it was cancelled."""
    arrivals = options.arrivals()
    try:
        if arrivals is None:
            await load.closed(asks, options.concurrency or len(asks))
        else:
            await load.open(asks, arrivals)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        return False
    return True


async def _form(client: Client, options: Options) -> Form:
    served = await client.models()
    model = options.model or served[0]
    if model not in served:
        raise RequestError(f"the server has no model {model!r}, expected one of {', '.join(served)}")
    return Form(model, options.endpoint, options.stream, options.gen_length, options.sampling)


async def _asks(client: Client, form: Form, options: Options) -> list[Ask]:
    vocab_size, avoided = options.vocab_size, frozenset()
    if vocab_size is None:
        vocab_size, avoided = await _vocabulary(client)
    count = options.requests + options.warmup
    prompts = draw_prompts(options.lengths, count, vocab_size, avoided, options.seed)
    asks = []
    for index, (ids, gen_length) in enumerate(zip(prompts, options.gen_lengths(count), strict=True)):
        given = await client.text(ids) if form.endpoint == "chat" else ids
        asks.append(Ask(index, form.body(given, gen_length), len(ids), gen_length, form.steps(gen_length)))
    return asks


async def _vocabulary(client: Client) -> tuple[int, frozenset[int]]:
    """The size of the vocabulary, and the ids with a meaning that the server names."""
    try:
        info = await client.tokenizer_info()
    except RequestError as e:
        raise RequestError(f"{e}: give --vocab-size") from None
    size = info.get("vocab_size")
    if not isinstance(size, int):
        raise RequestError("the server does not say the size of its vocabulary: give --vocab-size")
    named = [value for key, value in info.items() if key.endswith("_id")]
    return size, frozenset(value for value in named if isinstance(value, int))


def _growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The differences of all numbers that are counters."""
    grown = {}
    for key in after.keys() - _GAUGES:
        old, new = before.get(key), after[key]
        if isinstance(new, dict):
            grown[key] = _growth(old if isinstance(old, dict) else {}, new)
        elif isinstance(new, int | float):
            grown[key] = new - (old if isinstance(old, int | float) else 0)
    return dict(sorted(grown.items()))
