"""POST /v1/chat/completions."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jdllm.api.answers import STREAMED, chat_logprobs, prefilled, sampled
from jdllm.api.bodies import BodyRoute
from jdllm.api.errors import RESPONSES, bad_request
from jdllm.api.generation import Shape, answer, asked_of, naming_form, openai_options, pieces_of
from jdllm.api.protocol import ChatMessage, ChatRequest
from jdllm.api.service import Service
from jdllm.checkpoints.conversation import Rendering
from jdllm.outputs import CompletionOutput
from jdllm.prompts import AskedPrompt, Prompt, read_conversation, specs_of

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=RESPONSES | STREAMED)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, by the model's chat template."""
    service: Service = request.app.state.service
    service.model(body.model)
    asked = await asyncio.to_thread(_asked, service, body)
    return await answer(service, request, body, asked, _shape(service, body, asked))


def encode_chat(service: Service, messages: list[ChatMessage], rendering: Rendering) -> tuple[str, list[int]]:
    """The text of a conversation in the model's chat template, and its ids."""
    conversation = _conversation(messages)
    service.check_text(_characters(conversation))
    return service.tokenizer.encode_chat(conversation, rendering)


def _conversation(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the tokenizer takes them."""
    return [message.model_dump(exclude_none=True) for message in messages]


def _characters(value: Any) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, inner))


def _asked(service: Service, body: ChatRequest) -> list[AskedPrompt]:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request(
            "max_tokens and max_completion_tokens are one and the same: give either", "max_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")
    options = openai_options(body, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    if body.max_completion_tokens is not None:
        options["max_tokens"] = body.max_completion_tokens
    if body.context is None:
        prompt = Prompt(*encode_chat(service, body.messages, body.rendering))
    else:
        conversation = _conversation(body.messages)
        prompt = read_conversation(conversation, service.tokenizer, body.context, body.rendering)
    with naming_form(body):
        return asked_of(service, [prompt], service.sampling(body, **options))


def _shape(service: Service, body: ChatRequest, asked: list[AskedPrompt]) -> Shape:
    pieces, top = pieces_of(service), body.top_logprobs or 0
    specs = specs_of(asked)

    def choice(index: int, sample: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": chat_logprobs(pieces, *sampled(sample), top, sample.top_logprobs)
            if body.logprobs
            else None,
            "finish_reason": sample.finish_reason,
        } | prefilled(sample, specs[index], service.llm.tokenizer)

    def delta(index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs}

    return Shape(
        prefix="chatcmpl",
        object="chat.completion",
        chunk="chat.completion.chunk",
        opening=lambda index: {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
        },
        choice=choice,
        delta=delta,
        logprobs=(
            lambda ids, logprobs, steps, _, tops: chat_logprobs(pieces, ids, logprobs, steps, top, tops)
        )
        if body.logprobs
        else None,
    )
