"""The application: routes, errors and what stands before them."""

import dataclasses
from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from jdllm import __version__
from jdllm.api import admin, chat, completions, errors, infill, models, pages, responses, score
from jdllm.api.arrivals import Arrivals
from jdllm.api.guards import AllowedHosts, ApiKeys, BoundedBodies
from jdllm.api.request_log import RequestLog
from jdllm.api.schema import Application
from jdllm.api.service import Service

ROUTERS: tuple[APIRouter, ...] = (
    completions.router,
    chat.router,
    responses.router,
    infill.router,
    score.router,
    models.router,
    admin.router,
    pages.router,
)


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may ask, and how much.

    - `api_keys`: any of which will do; with none everybody may ask.
    - `admin_key`: a further one, whose owner sees and ends the requests of all; others only their own.
    - `allowed_hosts`: what clients may call this server; with none anything.
    - `cors_origins`: from whose pages browsers may ask, `*` for any.
    - `largest_body`: bytes.
    - `body_seconds`: that a body may take to arrive.
    """

    api_keys: Sequence[str] = ()
    admin_key: str | None = None
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    largest_body: int = 32 << 20
    body_seconds: float = 60.0


def create_app(service: Service, access: Access | None = None) -> FastAPI:
    """The application over a model.

    Arguments:
    - `service`: the model.
    - `access`: who may ask; by default everybody.
    """
    access = access or Access()
    app = Application(
        title="jdllm", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    errors.install(app, service.refused)
    for router in ROUTERS:
        app.include_router(router)
    generating = {f"/v1/{name}" for name in ("completions", "chat/completions", "responses", "infill")}
    app.add_middleware(Arrivals, expecting=service.engine.expecting, paths=generating)
    app.add_middleware(BoundedBodies, largest=access.largest_body, seconds=access.body_seconds)
    if access.api_keys or access.admin_key is not None:
        app.add_middleware(ApiKeys, keys=access.api_keys, admin_key=access.admin_key)
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients tell of themselves in headers of their own
            expose_headers=["Retry-After", "X-Request-Id", "X-Should-Retry"],
        )
    if access.allowed_hosts:
        app.add_middleware(AllowedHosts, names=access.allowed_hosts)
    settings = service.settings
    app.add_middleware(RequestLog, answered=settings.log_requests, prompts=settings.log_prompts)
    return app
