"""POST /v1/responses: OpenAI's Responses API for text. Nothing is stored."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from jdllm.api.answers import STREAMED, event, usage_of
from jdllm.api.bodies import BodyRoute
from jdllm.api.chat import encode_chat
from jdllm.api.errors import RESPONSES, ApiError, bad_request
from jdllm.api.fields import Fields
from jdllm.api.generation import asked_of, naming_form, openai_options, streamed
from jdllm.api.responses_protocol import ResponsesRequest
from jdllm.api.running import Running, call_id
from jdllm.api.service import Service
from jdllm.api.text_stream import TextStream
from jdllm.checkpoints.conversation import Rendering
from jdllm.outputs import RequestOutput
from jdllm.prompts import AskedPrompt, Prompt
from jdllm.serving.updates import StepUpdate

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses", responses=RESPONSES | STREAMED)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a text or a conversation, by the model's chat template. The answer is not stored."""
    service: Service = request.app.state.service
    model, ignored = service.model(body.model), service.ignored(body)
    _check(body)
    asked = await asyncio.to_thread(_asked, service, body)
    running = service.submit(request, "resp", [asked], "later" if body.stream else "none")
    answer = _Answer(body, running, asked, model, ignored)
    if body.stream:
        return streamed(_events(service, running, answer))
    with running:
        (output,) = await running.finish()
    return JSONResponse(answer.ended(output))


def _check(body: ResponsesRequest) -> None:
    if body.previous_response_id is not None:
        raise bad_request(
            "previous_response_id names an answer, and this server stores none: send the whole conversation"
            " as input",
            "previous_response_id",
        )
    if body.n not in (None, 1):
        raise bad_request(f"n is {body.n}, expected 1: a response is one answer", "n")
    if body.stream_mode == "denoise":
        raise bad_request("stream_mode is 'denoise': the events of a response are of its text", "stream_mode")
    if body.max_tokens is not None and body.max_output_tokens not in (None, body.max_tokens):
        raise bad_request("max_tokens and max_output_tokens are one and the same: give either", "max_tokens")


def _asked(service: Service, body: ResponsesRequest) -> AskedPrompt:
    options = openai_options(body, logprobs=None) | {"n": 1}
    if body.max_output_tokens is not None:
        options["max_tokens"] = body.max_output_tokens
    prompt = Prompt(*encode_chat(service, body.messages, Rendering()))
    with naming_form(body):
        (asked,) = asked_of(service, [prompt], service.sampling(body, **options))
    return asked


class _Answer:
    """Writes the response of a call, and the message in it, as they stand at some time.

    Arguments:
    - `model`: the name that the request is answered under.
    - `ignored`: what it says of fields that nobody knows.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        running: Running,
        asked: AskedPrompt,
        model: str,
        ignored: dict[str, Any],
    ):
        self.message_id = call_id("msg")
        sampling = asked.specs[0].sampling
        self._constant = {
            "id": running.id,
            "object": "response",
            "created_at": running.created,
            "model": model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens or body.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "seed": asked.seed,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": _format_of(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        } | ignored

    def running(self) -> dict[str, Any]:
        """The response before it has a text."""
        return self._response("in_progress", [])

    def message(self, text: str, status: str) -> dict[str, Any]:
        """The message that holds the whole text."""
        return self._message(status, [self.part(text)])

    def opened(self) -> dict[str, Any]:
        """The message before it has a text."""
        return self._message("in_progress", [])

    def part(self, text: str) -> dict[str, Any]:
        """The only part of the message."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def ended(self, output: RequestOutput) -> dict[str, Any]:
        """The response with its text; it is incomplete where the answer was cut at its length."""
        status = _status_of(output)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        message = self.message(output.text or "", status)
        return self._response(status, [message], incomplete_details=cut, usage=_usage(output))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response of a call that came to nothing."""
        told = error.body()["error"]
        return self._response("failed", [], error={"code": told["code"], "message": told["message"]})

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(self, status: str, output: list[Any], **further: Any) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return self._constant | {"status": status, "output": output} | nothing | further


def _format_of(body: ResponsesRequest) -> dict[str, Any]:
    """The format of the text, as it was asked for."""
    asked = body.text and body.text.format
    if isinstance(asked, Fields):
        return asked.model_dump()
    return {"type": "text"} if asked is None else dict(asked)


def _status_of(output: RequestOutput) -> str:
    """The status of an answer that has ended."""
    return "completed" if output.finish_reason == "stop" else "incomplete"


def _usage(output: RequestOutput) -> dict[str, Any]:
    counts = usage_of([output])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        "forward_evaluations": counts["forward_evaluations"],
    }


async def _events(service: Service, running: Running, answer: _Answer) -> AsyncGenerator[bytes]:
    """The events of a response, in the order and by the names that OpenAI's clients know."""
    numbers = itertools.count()

    def told(name: str, **fields: Any) -> bytes:
        kind = f"response.{name}"
        return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    place = {"item_id": answer.message_id, "output_index": 0, "content_index": 0}
    try:
        with running:
            yield told("created", response=answer.running())
            yield told("in_progress", response=answer.running())
            yield told("output_item.added", output_index=0, item=answer.opened())
            yield told("content_part.added", **place, part=answer.part(""))
            async for delta in _deltas(service, running):
                yield told("output_text.delta", **place, delta=delta, logprobs=[])
            (output,) = running.outputs()
            text, status = output.text or "", _status_of(output)
            yield told("output_text.done", **place, text=text, logprobs=[])
            yield told("content_part.done", **place, part=answer.part(text))
            yield told("output_item.done", output_index=0, item=answer.message(text, status))
            yield told(status, response=answer.ended(output))
    except ApiError as error:
        yield told("failed", response=answer.failed(error))


async def _deltas(service: Service, running: Running) -> AsyncIterator[str]:
    """New text of the only sample of a call."""
    stream = TextStream(running.asked[0].specs[0], service.tokenizer)
    async for choice, update in running:
        if isinstance(update, StepUpdate):
            delta = stream.take(update)
        else:
            sample = running.sample(choice)
            delta = stream.finish(sample.text or "", len(sample.token_ids))
        if delta.text:
            yield delta.text
