"""POST /v1/score: how likely given answers are."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from jdllm.api.answers import usage
from jdllm.api.bodies import BodyRoute
from jdllm.api.errors import RESPONSES
from jdllm.api.protocol import ScoreRequest
from jdllm.api.service import Service

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/score", responses=RESPONSES)
async def score(body: ScoreRequest, request: Request) -> dict[str, Any]:
    """log p(answer | prompt) of each answer: a causal model's exactly, others by stratified Monte Carlo, of
    block models block by block."""
    service: Service = request.app.state.service
    model, ignored = service.model(body.model), service.ignored(body)
    prompt, answers = await asyncio.to_thread(_ids, service, body)
    for answer in answers:
        service.check_length(len(prompt) + len(answer))
    found = await service.scored(
        lambda: service.llm.likelihoods(
            [(prompt, answer) for answer in answers],
            mc_num=body.mc_num,
            batch_size=body.batch_size,
            cfg_scale=body.cfg_scale,
            seed=body.seed,
            block_length=body.block_length,
        )
    )
    scores = [
        {"index": index, **one._asdict(), "tokens": len(answer)}
        for index, (one, answer) in enumerate(zip(found, answers, strict=True))
    ]
    counts = usage(len(prompt) + sum(map(len, answers)), 0, sum(one.mc_num for one in found))
    return {"object": "score", "model": model, "scores": scores, "usage": counts} | ignored


def _ids(service: Service, body: ScoreRequest) -> tuple[list[int], list[list[int]]]:
    def encode(given: str | list[int], *, begins: bool) -> list[int]:
        if not isinstance(given, str):
            return given
        return service.encode(given, parse_special=body.parse_special, begins=begins)

    return encode(body.prompt, begins=True), [encode(answer, begins=False) for answer in body.answers]
