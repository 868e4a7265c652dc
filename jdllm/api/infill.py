"""POST /v1/infill: masks anywhere in a text, and slots of so many tokens or of one of several texts."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from jdllm.api.answers import DONE, STREAMED, event, infill_usage, usage
from jdllm.api.bodies import BodyRoute
from jdllm.api.denoise_stream import denoise_events
from jdllm.api.errors import RESPONSES, bad_request
from jdllm.api.generation import pieces_of, streamed
from jdllm.api.protocol import ChoiceSlot, InfillRequest, TextSlot
from jdllm.api.running import call_id
from jdllm.api.service import Service
from jdllm.choosing import OptionScores
from jdllm.decoding.sampling import SamplingParams
from jdllm.prompts import AskedPrompt, Prompt, ask
from jdllm.serving.request import Request as Ended
from jdllm.serving.spec import mask_id_of

router = APIRouter(route_class=BodyRoute)


class Slot(NamedTuple):
    """A place that is filled.

    - `start`, `stop`: its positions.
    - `options`, `scores`: of a choice, which is filled already.
    """

    start: int
    stop: int
    options: Sequence[str] = ()
    scores: OptionScores | None = None


class Template(NamedTuple):
    """A sequence with masks, and its slots."""

    text: str | None
    tokens: list[int]
    slots: list[Slot]

    @property
    def chosen(self) -> bool:
        """Whether all its slots are choices, which leaves nothing to denoise."""
        return bool(self.slots) and all(slot.scores is not None for slot in self.slots)


@router.post("/v1/infill", responses=RESPONSES | STREAMED)
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fill what is missing; choices first, in order, each beside all that is filled already."""
    service: Service = request.app.state.service
    model, ignored = service.model(body.model), service.ignored(body)
    if body.stream and body.stream_mode == "text":
        raise bad_request("masks are not filled in the order of the text: expected denoise", "stream_mode")
    templates = await _templates(service, body)
    if all(template.chosen for template in templates):
        return _only_choices(service, body, model, templates, ignored)
    asked = await asyncio.to_thread(_asked, service, templates, service.sampling_of_masks(body))
    updates = "every" if body.stream else "none"
    running = service.submit(request, "infill", asked, updates)
    per_sample = [template for template, one in zip(templates, asked, strict=True) for _ in one.specs]
    if body.stream:
        events = denoise_events(
            running,
            pieces_of(service),
            ignored,
            lambda choice, _: {"slots": _slots(service, per_sample[choice], running.ended(choice))},
        )
        return streamed(events)
    with running:
        outputs = await running.finish()
    samples = [sample for output in outputs for sample in output.outputs]
    choices = [
        {
            "index": index,
            "text": sample.text,
            "token_ids": sample.token_ids,
            "slots": _slots(service, per_sample[index], running.ended(index)),
            "finish_reason": "stop",
            "nfe": sample.nfe,
        }
        for index, sample in enumerate(samples)
    ]
    head = {"id": running.id, "object": "infill", "created": running.created, "model": model}
    sequences = [output.prompt_token_ids for output in outputs]
    mask_id, made = mask_id_of(service.llm.config), len(samples) // len(outputs)
    counts = infill_usage(sequences, mask_id, made, sum(sample.nfe for sample in samples))
    return JSONResponse(head | {"choices": choices, "usage": counts} | ignored)


def _only_choices(
    service: Service,
    body: InfillRequest,
    model: str,
    templates: Sequence[Template],
    ignored: dict[str, Any],
) -> Response:
    """The answer where nothing is left to denoise once the choices are made."""
    (template,) = templates
    choice = {
        "index": 0,
        "text": service.tokenizer.decode(template.tokens),
        "token_ids": template.tokens,
        "slots": _slots(service, template, None),
        "finish_reason": "stop",
        "nfe": 0,
    }
    counts = usage(len(template.tokens), 0, 0)
    if body.stream:
        return streamed([event(choice | {"usage": counts} | ignored, "end"), DONE])
    head = {"id": call_id("infill"), "object": "infill", "created": int(time.time()), "model": model}
    return JSONResponse(head | {"choices": [choice], "usage": counts} | ignored)


async def _templates(service: Service, body: InfillRequest) -> list[Template]:
    given = {name: getattr(body, name) for name in ("text", "token_ids", "parts")}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise bad_request("give one of text, token_ids and parts", "text")
    ((name, value),) = given.items()
    causal = service.llm.config.in_order
    if causal and [type(part) for part in body.parts or [] if not isinstance(part, str)] != [ChoiceSlot]:
        raise bad_request(
            "a causal model fills no masks, but makes one choice: give parts with texts and one choice", name
        )
    if name == "parts":
        return [await _from_parts(service, body)]
    return await asyncio.to_thread(_from_masked, service, body, name, value)


def _from_masked(service: Service, body: InfillRequest, name: str, value: Any) -> list[Template]:
    """Texts or ids in which masks stand; each run of them is a slot."""
    mask_id = mask_id_of(service.llm.config)
    if name == "text":
        parsed = [] if service.mask_token is None else [service.mask_token]
        texts: list[str | None] = [value] if isinstance(value, str) else list(value)
        special = body.parse_special
        each = [service.encode(text or "", parse_special=special, parsed=parsed) for text in texts]
    else:
        each = [value] if isinstance(value[0], int) else value
        texts = [None] * len(each)
    return [Template(text, ids, _runs(ids, mask_id)) for text, ids in zip(texts, each, strict=True)]


def _runs(ids: Sequence[int], mask_id: int) -> list[Slot]:
    masked = np.concatenate([[False], np.asarray(ids) == mask_id, [False]])
    edges = np.flatnonzero(masked[1:] != masked[:-1]).reshape(-1, 2)
    return [Slot(int(start), int(stop)) for start, stop in edges]


async def _from_parts(service: Service, body: InfillRequest) -> Template:
    """Parts in order; where a choice stands, its likeliest option."""
    parts, special, config = body.parts or [], body.parse_special, service.llm.config
    blank = 0 if config.in_order else mask_id_of(config)  # a causal model's choice leaves none
    if not isinstance(parts[0], str):
        parts = ["", *parts]  # what begins a text begins this one
    if not any(isinstance(part, TextSlot | ChoiceSlot) for part in parts):
        raise bad_request("parts has no slot: nothing is to be filled", "parts")
    service.check_length(sum(part.max_tokens for part in parts if isinstance(part, TextSlot)))

    def encode(part: Any, *, begins: bool = False) -> list[int]:
        if isinstance(part, str):
            return service.encode(part, parse_special=special, begins=begins)
        if isinstance(part, TextSlot):
            return [blank] * part.max_tokens
        return [blank] * max(len(encode(option)) for option in part.options)

    pieces = await asyncio.to_thread(lambda: [encode(part, begins=not at) for at, part in enumerate(parts)])
    service.check_length(sum(map(len, pieces)))
    scores: dict[int, OptionScores] = {}
    for at, part in enumerate(parts):
        if isinstance(part, ChoiceSlot):
            options = [encode(option) for option in part.options]
            before, after = _joined(pieces[:at]), _joined(pieces[at + 1 :])
            scores[at] = await service.scored(
                lambda given=(before, options, after): service.llm.choose(*given)
            )
            pieces[at] = options[scores[at].best]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    slots = [
        Slot(end - len(piece), end, getattr(part, "options", ()), scores.get(at))
        for at, (part, piece, end) in enumerate(zip(parts, pieces, ends, strict=True))
        if not isinstance(part, str)
    ]
    return Template(None, _joined(pieces), slots)


def _joined(pieces: Sequence[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(pieces))


def _asked(service: Service, templates: Sequence[Template], sampling: SamplingParams) -> list[AskedPrompt]:
    service.check_room(len(templates) * sampling.n)
    for template in templates:
        service.check_length(len(template.tokens))
    prompts = [Prompt(template.text, template.tokens) for template in templates]
    return ask(prompts, [sampling] * len(prompts), service.llm.infill_spec)


def _slots(service: Service, template: Template, state: Ended | None) -> list[dict[str, Any]]:
    """Each slot with its tokens, their log-probabilities and the steps that committed them; `state` is the
    finished request, `None` where nothing was denoised."""
    tokens = template.tokens if state is None else state.tokens.tolist()
    tokenizer = service.llm.tokenizer
    found = []
    for slot in template.slots:
        place = slice(slot.start, slot.stop)
        entry: dict[str, Any] = {
            "type": "text" if slot.scores is None else "choice",
            "start": slot.start,
            "stop": slot.stop,
            "text": None if tokenizer is None else tokenizer.decode(tokens[place], tokens[: slot.start]),
            "token_ids": tokens[place],
        }
        if slot.scores is not None:
            entry |= _chosen(slot.options, slot.scores)
        elif state is not None:
            entry["logprobs"] = state.logprobs[place].tolist()
            entry["committed_in"] = state.committed_in[place].tolist()
        found.append(entry)
    return found


def _chosen(options: Sequence[str], scores: OptionScores) -> dict[str, Any]:
    columns = zip(options, scores.probabilities, scores.logprobs, strict=True)
    listed = [{"text": text, "probability": share, "logprob": logprob} for text, share, logprob in columns]
    return {"options": listed, "chosen": scores.best}
