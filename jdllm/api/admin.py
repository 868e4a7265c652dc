"""How the server is: health, version, metrics, counts, and the requests that are there."""

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from jdllm import __version__
from jdllm.api.errors import RESPONSES, dead
from jdllm.api.running import owner_of
from jdllm.api.service import Service
from jdllm.serving.demands import Kind

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=RESPONSES)
async def health(request: Request) -> Response:
    """Whether requests are answered."""
    service: Service = request.app.state.service
    if service.engine.error is not None:
        return dead(service.engine.error).response()
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of jdllm."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """What Prometheus scrapes."""
    service: Service = request.app.state.service
    return Response(service.metrics.render(), media_type=service.metrics.content_type)


@router.get("/v1/stats", responses=RESPONSES)
async def stats(request: Request) -> dict[str, Any]:
    """Counts since the start, and what is held now."""
    service: Service = request.app.state.service
    counts = service.llm.engine.stats()._asdict()
    counts |= {name: _by_kind(count) for name, count in counts.items() if isinstance(count, dict)}
    counts["head_rows"] = sum(counts["head_rows"].values())
    executables = service.llm.executables
    return counts | {
        "uptime": time.monotonic() - service.started,
        "compiled": executables.compiled,
        "loaded": executables.loaded,
        "http": service.metrics.http(),
    }


def _by_kind(counts: dict[Kind, float]) -> dict[str, float]:
    return {kind.name.lower(): count for kind, count in counts.items()}


@router.get("/v1/requests", responses=RESPONSES)
async def requests(request: Request) -> dict[str, Any]:
    """The requests that wait or run, in order of arrival: one for each sample. The owner of a key sees the
    requests of the key, and the owner of the admin's key all requests."""
    service: Service = request.app.state.service
    owner = owner_of(request)
    calls = {id: call for call, running in service.calls_of(owner).items() for id in running.requests}
    now, data = time.time(), []
    for state in service.llm.engine.requests():
        if owner is not None and state.id not in calls:
            continue
        fields = state._asdict()
        fields["id"] = calls.get(state.id)
        fields["state"] = "running" if fields.pop("running") else "waiting"
        fields["created"] = int(now - fields.pop("age"))
        data.append(fields | {"object": "request"})
    return {"object": "list", "data": data}


@router.delete("/v1/requests/{call}", responses=RESPONSES)
async def cancel(call: str, request: Request) -> dict[str, Any]:
    """End a call; its client is told so. Who has a key ends calls of the key, and who has the admin's any."""
    service: Service = request.app.state.service
    service.cancel(call, owner_of(request))
    return {"id": call, "object": "request", "deleted": True}
