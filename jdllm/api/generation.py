"""What completions and chat have in common: a call from its prompts, its answer and its stream."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from jdllm.api.answers import (
    DONE,
    EVENTS,
    Pieces,
    Tops,
    event,
    kept_alive,
    prompt_tokens,
    usage,
    usage_of,
    way_of,
)
from jdllm.api.denoise_stream import denoise_events
from jdllm.api.errors import ApiError, bad_request
from jdllm.api.formats import Form
from jdllm.api.protocol import OpenAIFields, StreamOptions
from jdllm.api.running import Running
from jdllm.api.service import Service
from jdllm.api.text_stream import TextStream
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.outputs import CompletionOutput
from jdllm.prompts import AskedPrompt, Prompt, ask, specs_of
from jdllm.serving.engine import Updates
from jdllm.serving.long.request import LongContext
from jdllm.serving.updates import StepUpdate, Update

_STRUCTURE = "structure "
"""Errors that concern it begin so."""


class Shape(NamedTuple):
    """How one of the two APIs writes its answers.

    - `prefix`, `object`, `chunk`: of ids, whole answers and parts of a stream.
    - `opening`: a choice of the first chunk, `None` where there is none.
    - `choice`: a whole choice, from its index and the sample.
    - `delta`: a choice of a chunk, from its index, the new text and log-probabilities or `None`.
    - `logprobs`: of a stretch of tokens: ids, log-probabilities, steps, places in the text, and `Tops`.
    """

    prefix: str
    object: str
    chunk: str
    opening: Callable[[int], dict[str, Any]] | None
    choice: Callable[[int, CompletionOutput], dict[str, Any]]
    delta: Callable[[int, str, Any], dict[str, Any]]
    logprobs: (
        Callable[[Sequence[int], Sequence[float | None], Sequence[int | None], Sequence[int], Tops], Any]
        | None
    )


def asked_of(service: Service, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[AskedPrompt]:
    """The requests of a call that generates behind its prompts; raises as `jdllm.prompts.ask` does."""
    service.check_room(len(prompts) * sampling.n)
    for prompt in prompts:
        # Of a long context the engine says itself what does not fit.
        if not isinstance(prompt.ids, LongContext):
            service.check_length(len(prompt.ids) + sampling.gen_length)
    return ask(prompts, [sampling] * len(prompts), service.llm.spec)


def openai_options(body: OpenAIFields, *, logprobs: int | None) -> dict[str, Any]:
    """What OpenAI's fields say in the words of `SamplingParams`, whose `logprobs` they differ in."""
    options: dict[str, Any] = {"logprobs": logprobs}
    if body.ignore_eos:
        options["early_stop"] = False
    if (form := form_of(body)) is not None:
        options["structure"] = form.structure
    return options


def form_of(body: OpenAIFields) -> Form | None:
    """The form that an answer is to have, `None` where it may have any; raises `ApiError` for two of them."""
    forms = [*body.forms, *([] if body.structure is None else [Form("structure", {})])]
    if len(forms) > 1:
        names = " and ".join(form.field for form in forms)
        raise bad_request(f"{names} say what form the answer has: give one of them", forms[0].field)
    return forms[0] if body.forms else None


@contextlib.contextmanager
def naming_form(body: OpenAIFields) -> Iterator[None]:
    """Let errors that concern the form of the answer name the field of the request that asks for it."""
    try:
        yield
    except RequestError as error:
        form, message = form_of(body), str(error)
        if form is None or not message.startswith(_STRUCTURE):
            raise
        raise bad_request(f"{form.field} {message.removeprefix(_STRUCTURE)}", form.field) from None


async def answer(
    service: Service, request: Request, body: OpenAIFields, asked: Sequence[AskedPrompt], shape: Shape
) -> Response:
    """Run a call and answer it, whole or as a stream."""
    model, ignored = service.model(body.model), service.ignored(body)
    running = service.submit(request, shape.prefix, asked, _updates(body, asked))
    if body.stream:
        if body.stream_mode == "denoise":
            events = denoise_events(running, pieces_of(service), ignored)
        else:
            chunks = _Chunks(
                service, running, model, body.stream_options or StreamOptions(), shape, ignored=ignored
            )
            events = _text_events(running, chunks)
        return streamed(events)
    with running:
        outputs = await running.finish()
    samples = [sample for output in outputs for sample in output.outputs]
    seeds = [output.seed for output in outputs]
    head = _head(running, model, shape.object)
    choices = [
        shape.choice(i, sample) | {"nfe": sample.nfe} | way_of(sample) for i, sample in enumerate(samples)
    ]
    return JSONResponse(head | {"choices": choices, "usage": usage_of(outputs), "seeds": seeds} | ignored)


def streamed(events: AsyncGenerator[bytes] | Iterable[bytes]) -> StreamingResponse:
    """Server-sent events as an answer, which proxies neither keep nor hold back nor find silent."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    content = kept_alive(events) if isinstance(events, AsyncGenerator) else events
    return StreamingResponse(content, media_type=EVENTS, headers=headers)


def _updates(body: OpenAIFields, asked: Sequence[AskedPrompt]) -> Updates:
    """Tokens in order are read as they come; the text of a block often comes at its end anyway."""
    if not body.stream:
        return "none"
    as_they_come = body.stream_mode == "denoise" or any(spec.in_order for spec in specs_of(asked))
    return "every" if as_they_come else "later"


def pieces_of(service: Service) -> Pieces:
    """Texts of the tokens of a server's model."""
    return Pieces(service.llm.tokenizer)


def _head(running: Running, model: str, kind: str) -> dict[str, Any]:
    return {"id": running.id, "object": kind, "created": running.created, "model": model}


class _Chunks:
    """Writes the chunks of a stream of text.

    Arguments:
    - `ignored`: what the first chunk has beside the others' fields.
    """

    def __init__(
        self,
        service: Service,
        running: Running,
        model: str,
        options: StreamOptions,
        shape: Shape,
        *,
        ignored: dict[str, Any],
    ):
        self.texts = [TextStream(spec, service.llm.tokenizer) for spec in specs_of(running.asked)]
        self.running, self.shape, self.options = running, shape, options
        self._first = ignored
        self._head = _head(running, model, shape.chunk)
        self._read = prompt_tokens(running.asked)

    def chunk(self, choice: dict[str, Any], reason: str | None = None) -> bytes:
        """One choice, with the usage so far where it was asked for."""
        data = self._head | {"choices": [choice | {"finish_reason": reason}]} | self._first
        self._first = {}
        if self.options.continuous_usage_stats:
            data["usage"] = usage(self._read, sum(text.tokens_told for text in self.texts))
        elif self.options.include_usage:
            data["usage"] = None
        return event(data)

    def of(self, choice: int, update: Update) -> bytes | None:
        """What an update brings, `None` where that is nothing."""
        stream, reason = self.texts[choice], None
        if isinstance(update, StepUpdate):
            delta = stream.take(update)
        else:
            sample = self.running.sample(choice)
            delta, reason = stream.finish(sample.text or "", len(sample.token_ids)), sample.finish_reason
        counted = delta.tokens[0] and (self.shape.logprobs or self.options.continuous_usage_stats)
        if not delta.text and reason is None and not counted:
            return None
        logprobs = self.shape.logprobs and self.shape.logprobs(*delta.tokens, delta.tops)
        return self.chunk(self.shape.delta(choice, delta.text, logprobs), reason)

    def last(self) -> bytes:
        """The usage of all, without a choice."""
        return event(self._head | {"choices": [], "usage": usage_of(self.running.outputs())})


async def _text_events(running: Running, chunks: _Chunks) -> AsyncGenerator[bytes]:
    """Chunks of committed text, in order."""
    try:
        with running:
            if chunks.shape.opening is not None:
                for choice in range(len(chunks.texts)):
                    yield chunks.chunk(chunks.shape.opening(choice))
            async for choice, update in running:
                told = chunks.of(choice, update)
                if told is not None:
                    yield told
            if chunks.options.include_usage:
                yield chunks.last()
    except ApiError as error:
        yield event(error.body())
    yield DONE
