"""POST /v1/completions."""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from jdllm.api.answers import (
    STREAMED,
    Ranked,
    completion_logprobs,
    prefilled,
    ranked_of,
    sampled,
    usage,
)
from jdllm.api.bodies import BodyRoute
from jdllm.api.errors import RESPONSES, bad_request
from jdllm.api.generation import Shape, answer, asked_of, naming_form, openai_options, pieces_of
from jdllm.api.protocol import CompletionRequest
from jdllm.api.running import call_id
from jdllm.api.service import Service
from jdllm.outputs import CompletionOutput
from jdllm.prompts import AskedPrompt, LongPrompt, Prompt, ask, read_long, specs_of
from jdllm.scoring import Conditional
from jdllm.serving.spec import mask_id_of
from jdllm.serving.timings import Timings

router = APIRouter(route_class=BodyRoute)

_NOTHING = CompletionOutput(
    index=0, text="", token_ids=[], finish_reason="length", nfe=0, timings=Timings(0.0, 0.0)
)
"""What is generated behind an echo alone."""


@router.post("/v1/completions", responses=RESPONSES | STREAMED)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Generate behind each prompt, or between a prompt and a suffix."""
    service: Service = request.app.state.service
    service.model(body.model)
    _check(body)
    asked = await asyncio.to_thread(_between if body.suffix else _behind, service, body)
    shape = _shape(service, body, asked)
    if body.max_tokens == 0 or (body.echo and body.logprobs is not None):
        return await _echoes(service, request, body, asked)
    return await answer(service, request, body, asked, shape)


def _check(body: CompletionRequest) -> None:
    if body.context is None and body.instruction is not None:
        raise bad_request("instruction stands before a context, and there is none", "instruction")
    if body.context is not None and (body.suffix or body.echo):
        raise bad_request("with a context there is neither suffix nor echo: leave them out", "context")
    if body.best_of not in (None, body.n or 1):
        raise bad_request(f"best_of is {body.best_of}, expected n: all samples are returned", "best_of")
    if body.echo and body.stream:
        raise bad_request("echo is for answers that are not streamed: leave stream or echo out", "echo")
    if body.echo and body.logprobs is not None and (body.max_tokens not in (0, 1) or body.suffix):
        raise bad_request(
            "echo with logprobs scores the prompt: it needs max_tokens 0 or 1, and no suffix",
            "logprobs",
        )
    if body.max_tokens == 0 and (body.suffix or not body.echo):
        raise bad_request(
            "max_tokens is 0, which returns an echo alone: set echo, without a suffix", "max_tokens"
        )


def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    """The prompts; texts are encoded."""
    given: Any = body.prompt
    many = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if body.context is not None:
        encode = functools.partial(service.encode, parse_special=body.parse_special)
        around: Any = {"context": body.context, "instruction": body.instruction or ""}
        return [read_long(LongPrompt(query=one, **around), encode) for one in many]
    return [
        Prompt(one, service.encode(one, parse_special=body.parse_special))
        if isinstance(one, str)
        else Prompt(None, one)
        for one in many
    ]


def _behind(service: Service, body: CompletionRequest) -> list[AskedPrompt]:
    options = openai_options(body, logprobs=body.logprobs)
    if body.max_tokens == 0:  # nothing of this is generated
        options["max_tokens"] = 1
    prompts = _prompts(service, body)
    with naming_form(body):
        return asked_of(service, prompts, service.sampling(body, **options))


def _between(service: Service, body: CompletionRequest) -> list[AskedPrompt]:
    """Masks between each prompt and the suffix; only these are the answer."""
    options = openai_options(body, logprobs=body.logprobs)
    with naming_form(body):
        sampling = service.sampling_of_masks(body, **options)
    masks = sampling.max_tokens or sampling.gen_length
    config = service.llm.config
    suffix = service.encode(body.suffix or "", parse_special=body.parse_special, begins=False)
    prompts = _prompts(service, body)
    service.check_room(len(prompts) * sampling.n)
    for prompt in prompts:
        service.check_length(len(prompt.ids) + masks + len(suffix))

    def make(ids: Any, one: Any) -> Any:
        spec = service.llm.infill_spec([*ids, *[mask_id_of(config)] * masks, *suffix], one)
        return dataclasses.replace(spec, returned=slice(len(ids), len(ids) + masks))

    with naming_form(body):
        return ask(prompts, [sampling] * len(prompts), make)


def _shape(service: Service, body: CompletionRequest, asked: Sequence[AskedPrompt]) -> Shape:
    pieces = pieces_of(service)
    texts = [_echoed(service, one) if body.echo else "" for one in asked for _ in one.specs]
    specs = specs_of(asked)

    def choice(index: int, sample: CompletionOutput) -> dict[str, Any]:
        found = None
        if body.logprobs is not None:
            offsets = pieces.offsets(specs[index], sample.token_ids, sample.text)
            places = [len(texts[index]) + at for at in offsets]
            found = completion_logprobs(pieces, *sampled(sample), places, _ranked(sample))
        return {
            "index": index,
            "text": texts[index] + (sample.text or ""),
            "token_ids": sample.token_ids,
            "logprobs": found,
            "finish_reason": sample.finish_reason,
        } | prefilled(sample, specs[index], service.llm.tokenizer)

    return Shape(
        prefix="cmpl",
        object="text_completion",
        chunk="text_completion",
        opening=None,
        choice=choice,
        delta=lambda index, text, logprobs: {"index": index, "text": text, "logprobs": logprobs},
        logprobs=None
        if body.logprobs is None
        else lambda ids, logprobs, steps, places, tops: completion_logprobs(
            pieces, ids, logprobs, steps, places, ranked_of(ids, logprobs, tops)
        ),
    )


def _ranked(sample: CompletionOutput) -> list[Ranked | None]:
    tokens, logprobs, _ = sampled(sample)
    return ranked_of(tokens, logprobs, sample.top_logprobs)


def _echoed(service: Service, one: AskedPrompt) -> str:
    """The prompt as it was given. Of ids the text, where there is a tokenizer; a character that they leave
    unfinished is the answer's."""
    if one.text is not None or service.llm.tokenizer is None:
        return one.text or ""
    return service.tokenizer.decode(one.specs[0].prompt, final=False)


async def _echoes(
    service: Service, request: Request, body: CompletionRequest, asked: Sequence[AskedPrompt]
) -> Response:
    """The prompts and a token each, or none, with the log-probability of every token of the prompt where they
    are asked for: given the tokens before it where the model is scored so, and in other models with only this
    token masked."""
    ignored, causal = service.ignored(body), service.llm.config.scored_in_order
    call, created, samples = call_id("cmpl"), int(time.time()), [_NOTHING] * len(asked)
    if body.max_tokens:
        running = service.submit(request, "cmpl", asked, "none")
        with running:
            samples = [output.outputs[0] for output in await running.finish()]
        call, created = running.id, running.created
    prompts = [one.specs[0].prompt.tolist() for one in asked]
    evaluations = sum(sample.nfe for sample in samples)
    logprobs: Sequence[dict[str, Any] | None] = [None] * len(asked)
    if body.logprobs is not None:
        scored = await (_given_those_before if causal else _each_alone)(service, prompts, body.logprobs)
        kind = {"kind": "log_likelihood" if causal else "pseudo_log_likelihood"}
        columns = zip(asked, samples, scored, strict=True)
        logprobs = [_scored(service, *column) | kind for column in columns]
        evaluations += len(prompts) if causal else sum(map(len, prompts))
    choices = [
        {
            "index": index,
            "text": _echoed(service, one) + (sample.text or ""),
            "logprobs": found,
            "finish_reason": sample.finish_reason,
        }
        for index, (one, sample, found) in enumerate(zip(asked, samples, logprobs, strict=True))
    ]
    return JSONResponse(
        {
            "id": call,
            "object": "text_completion",
            "created": created,
            "model": service.model(body.model),
            "choices": choices,
            "usage": usage(sum(map(len, prompts)), sum(len(one.token_ids) for one in samples), evaluations),
        }
        | ignored
    )


def _scored(
    service: Service, asked: AskedPrompt, sample: CompletionOutput, scores: Sequence[Conditional | None]
) -> dict[str, Any]:
    """Log-probabilities of a prompt, whose tokens have scores, and of its first sample."""
    pieces, ids = pieces_of(service), asked.specs[0].prompt.tolist()
    text, (spec, *_) = _echoed(service, asked), asked.specs
    places = [0] * len(ids) if pieces.tokenizer is None else pieces.tokenizer.offsets_in(text, ids)
    places += [len(text) + at for at in pieces.offsets(spec, sample.token_ids, sample.text)]
    tokens, logprobs, steps = sampled(sample)
    told = [
        score
        and [
            (token, score.logprob),
            (score.best, score.best_logprob),
            *(score.top_logprobs or {}).items(),
        ]
        for token, score in zip(ids, scores, strict=True)
    ]
    return completion_logprobs(
        pieces,
        [*ids, *tokens],
        [*(score and score.logprob for score in scores), *logprobs],
        [*[None] * len(ids), *steps],
        places,
        [*told, *_ranked(sample)],
    )


async def _each_alone(service: Service, prompts: Sequence[list[int]], top: int) -> list[list[Conditional]]:
    def score(ids: list[int]) -> list[Conditional]:
        return service.llm.pseudo_likelihood(ids, top_logprobs=top)

    return [await service.scored(functools.partial(score, ids)) if ids else [] for ids in prompts]


async def _given_those_before(
    service: Service, prompts: Sequence[list[int]], top: int
) -> list[list[Conditional | None]]:
    """`None` for the first token of each, which nothing is before."""
    pairs = [(ids[:1], ids[1:]) for ids in prompts if len(ids) > 1]
    found = iter(await service.scored(lambda: service.llm.token_logprobs(pairs, top_logprobs=top)))
    return [[None, *(next(found) if len(ids) > 1 else [])] for ids in prompts]
