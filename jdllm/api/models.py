"""The model that is served, and its tokenizer."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from jdllm.api.bodies import BodyRoute
from jdllm.api.chat import encode_chat
from jdllm.api.errors import RESPONSES, bad_request
from jdllm.api.protocol import DetokenizeRequest, TokenizeRequest
from jdllm.api.service import Service

router = APIRouter(route_class=BodyRoute)


@router.get("/v1/models", responses=RESPONSES)
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> dict[str, Any]:
    """The names that the model answers to."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [_card(service, name) for name in service.settings.names]}


@router.get("/v1/models/{name:path}", responses=RESPONSES)
async def model(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    service: Service = request.app.state.service
    return _card(service, service.model(name))


@router.get("/server_info", responses=RESPONSES)
async def server_info(request: Request) -> dict[str, str]:
    """The model's first name, in the form in which sglang-router asks for it."""
    service: Service = request.app.state.service
    return {"served_model_name": service.settings.names[0]}


@router.post("/tokenize", responses=RESPONSES)
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Ids of a text, in which special tokens become theirs unless `parse_special` is false, or of a
    conversation in the model's chat template."""
    service: Service = request.app.state.service
    service.model(body.model)
    ignored = service.ignored(body)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    ids = await asyncio.to_thread(_ids, service, body)
    return {"tokens": ids, "count": len(ids), "max_model_len": service.longest} | ignored


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return encode_chat(service, body.messages, body.rendering)[1]
    return service.encode(
        body.prompt or "",
        parse_special=body.parse_special is not False,
        begins=body.add_special_tokens is not False,
    )


@router.post("/detokenize", responses=RESPONSES)
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """Text of ids, without special tokens."""
    service: Service = request.app.state.service
    service.model(body.model)
    # A model may have more ids than its tokenizer, and answer them; they have no text.
    known = max(len(service.tokenizer), service.llm.config.vocab_size)
    if unknown := [f"tokens[{at}] is {token}" for at, token in enumerate(body.tokens) if token >= known][:1]:
        raise bad_request(f"{unknown[0]}, expected an id below {known}", "tokens")
    ignored = service.ignored(body)
    return {"prompt": await asyncio.to_thread(service.tokenizer.decode, body.tokens)} | ignored


@router.get("/tokenizer_info", responses=RESPONSES)
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What a client needs to prepare token ids itself."""
    service: Service = request.app.state.service
    config, tokenizer = service.llm.config, service.tokenizer
    ids = {"eos": config.eos_id, "eot": config.eot_id, "mask": config.mask_id}
    texts = {name: None if i is None else tokenizer.token(i) for name, i in ids.items()}
    special = tokenizer.special_tokens
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": len(tokenizer),
        "model_vocab_size": config.vocab_size,
        "bos_token": special.get("bos_token"),
        "pad_token": special.get("pad_token"),
        "chat_template": tokenizer.chat_template,
        **{f"{name}_token": text for name, text in texts.items()},
        **{f"{name}_token_id": i for name, i in ids.items()},
    }


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jdllm",
        "max_model_len": service.longest,
        "family": service.llm.config.family,
    }
