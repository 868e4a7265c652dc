"""A server that batches statically, as a loop around `LLM.generate` would, to measure `jdllm serve` against.

It answers what `jdllm bench serve` asks of completions.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from benchmarks.cases import case_parser
from jdllm.api import admin, errors, models
from jdllm.api.answers import usage_of
from jdllm.api.bodies import BodyRoute
from jdllm.api.errors import bad_request
from jdllm.api.generation import asked_of, openai_options
from jdllm.api.metrics import Metrics
from jdllm.api.protocol import CompletionRequest
from jdllm.api.running import call_id
from jdllm.api.server import bind
from jdllm.api.service import Service, Settings
from jdllm.cli.asked_server import describe_account
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from jdllm.prompts import Prompt
from jdllm.serving.async_engine import QUIET, AsyncEngine

BATCH = 32


class Waiting(NamedTuple):
    """A request that waits for its batch, and where its output goes."""

    prompt: list[int]
    sampling: SamplingParams
    output: asyncio.Future[RequestOutput]


class Batches:
    """Generates one batch after another.

    Arguments:
    - `generate`: `LLM.generate` of the model.
    - `size`: requests of a batch at most.
    """

    def __init__(self, generate: Callable[..., list[RequestOutput]], size: int):
        self._generate, self._size = generate, size
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue()

    async def answer(self, prompt: list[int], sampling: SamplingParams) -> RequestOutput:
        """The output of a request, once its whole batch has ended; raises as `LLM.generate` does."""
        output = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(Waiting(prompt, sampling, output))
        return await output

    async def run(self) -> None:
        """Generate whatever comes, until this is cancelled."""
        while True:
            batch = await self._next()
            prompts, sampling = [one.prompt for one in batch], [one.sampling for one in batch]
            try:
                outputs = await asyncio.to_thread(self._generate, prompt_token_ids=prompts, sampling=sampling)
            except Exception as error:
                for one in batch:
                    one.output.set_exception(error)
            else:
                for one, output in zip(batch, outputs, strict=True):
                    one.output.set_result(output)

    async def _next(self) -> list[Waiting]:
        """The requests that have waited longest. Clients that start together share a batch, though they reach
        an idle server some milliseconds apart."""
        batch = [await self._waiting.get()]
        with contextlib.suppress(TimeoutError):
            while len(batch) < self._size:
                batch.append(await asyncio.wait_for(self._waiting.get(), QUIET))
        return batch


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> JSONResponse:
    """Generate behind one prompt of token ids."""
    service: Service = request.app.state.service
    batches: Batches = request.app.state.batches
    model = service.model(body.model)
    if body.stream:
        raise bad_request("answers come whole, at the end of their batch: leave stream out", "stream")
    ids: Any = body.prompt
    if isinstance(ids, str) or not isinstance(ids[0], int):
        raise bad_request("prompt has to be a list of token ids here", "prompt")
    sampling = service.sampling(body, **openai_options(body, logprobs=None))
    asked_of(service, [Prompt(None, ids)], sampling)  # what is too long spoils no batch
    output = await batches.answer(ids, sampling)
    choices = [
        {"index": i, "text": sample.text, "logprobs": None, "finish_reason": sample.finish_reason}
        | {"nfe": sample.nfe}
        for i, sample in enumerate(output.outputs)
    ]
    head = {"id": call_id("cmpl"), "object": "text_completion", "created": int(time.time())}
    return JSONResponse(head | {"model": model, "choices": choices, "usage": usage_of([output])})


@contextlib.contextmanager
def application(llm: LLM, settings: Settings, size: int) -> Iterator[FastAPI]:
    """The application over a model; inside `with`.

    Arguments:
    - `size`: requests of a batch at most.
    """
    batches = Batches(llm.generate, size)

    @contextlib.asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batches.run())
        yield
        task.cancel()

    # The routes of jdllm ask this for the health of the engine, which `LLM.generate` drives itself.
    engine = AsyncEngine(llm.engine)
    service = Service(llm, engine, settings, Metrics(settings.names[0], llm.engine, llm.executables))
    app = FastAPI(lifespan=running)
    app.state.service, app.state.batches = service, batches
    errors.install(app, service.refused)
    for part in (router, models.router, admin.router):
        app.include_router(part)
    try:
        yield app
    finally:
        service.close()
        engine.close()


def main(arguments: Sequence[str]) -> None:
    """A server that collects waiting requests, runs them as one call of `LLM.generate` with the sampling that
    each asked for, answers all of them when the last has ended, and only then takes the next batch.

    `python3 -m benchmarks static_batcher MODEL [--batch 32]`; `python3 -m benchmarks serving --static` starts
    one. Its batches are better than a script's: no row is padding up to the longest prompt.
    """
    parser = case_parser("static_batcher", main.__doc__, records=False)
    parser.add_argument("model", type=Path, help="directory of the checkpoint")
    parser.add_argument("--batch", type=int, default=BATCH, help="requests of a batch at most")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one")
    parser.add_argument("--max-num-batched-tokens", type=int, help="by default as many as LLM chooses")
    parser.add_argument("--max-num-logits", type=int, help="by default as many as LLM chooses")
    parser.add_argument("--cache-dir", default="auto", help="of compiled executables")
    parser.add_argument("--allow-beyond-positions", action="store_true", help="take longer sequences, too")
    args = parser.parse_args(arguments)
    with (
        bind("127.0.0.1", args.port) as bound,
        LLM(
            args.model,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_logits=args.max_num_logits,
            cache_dir=args.cache_dir,
        ) as llm,
    ):
        print(describe_account(llm.account), flush=True)
        if llm.executables.platform != "cpu":
            llm.warmup()
        settings = Settings(
            names=(args.model.name,),
            default_sampling=llm.default_sampling(),
            allow_beyond_positions=args.allow_beyond_positions,
        )
        with application(llm, settings, args.batch) as app:
            print(f"{args.model.name} at http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
            uvicorn.Server(uvicorn.Config(app, access_log=False)).run(sockets=[bound])
