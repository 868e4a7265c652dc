"""A model behind HTTP: the thread of its engine and its application, whoever takes the connections."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG

from jdllm.api import memory
from jdllm.api.app import Access, create_app
from jdllm.api.metrics import Metrics
from jdllm.api.service import Service, Settings
from jdllm.llm import LLM
from jdllm.serving.async_engine import AsyncEngine

LOGGING = {
    **LOGGING_CONFIG,
    "loggers": {
        **LOGGING_CONFIG["loggers"],
        "jdllm.api": {"handlers": ["default"], "level": "INFO", "propagate": False},
    },
}
"""Uvicorn's settings of `logging`, in whose form the server tells of requests too."""

_SWITCH_SECONDS = 5e-4


class Served(NamedTuple):
    """What answers the requests of a model.

    - `app`: takes the requests.
    - `service`: holds the calls that wait or run.
    - `engine`: runs them.
    """

    app: ASGIApp
    service: Service
    engine: AsyncEngine


@contextlib.contextmanager
def served(
    llm: LLM, settings: Settings, access: Access, on_dead: Callable[[Exception], None]
) -> Iterator[Served]:
    """Put a model behind an application, inside `with`.

    Arguments:
    - `llm`: the model; it is closed at the end.
    - `settings`: how it is served.
    - `access`: who may ask.
    - `on_dead`: called with the error of an engine that cannot go on, by the engine's thread.
    """
    # Streams keep the event loop busy; the engine's thread would wait 5 ms for each of its turns.
    sys.setswitchinterval(_SWITCH_SECONDS)
    llm.engine.scheduler.share()
    engine = AsyncEngine(llm.engine, on_dead=on_dead)
    metrics = Metrics(settings.names[0], llm.engine, llm.executables)
    llm.engine.observe = metrics.observe_part
    service = Service(llm, engine, settings, metrics)
    try:
        with _traced(create_app(service, access), settings) as app:
            yield Served(app, service, engine)
    finally:
        service.close()
        engine.close()
        llm.close()


def settle() -> None:
    """Let the process go on with what is there now: garbage collections need not look through the model's
    objects again, and threads keep little of what they free."""
    gc.collect()
    gc.freeze()
    memory.keep_little()


def _traced(app: ASGIApp, settings: Settings) -> contextlib.AbstractContextManager[ASGIApp]:
    """The application, inside `with`; it tells of its requests where that is asked for."""
    endpoint = settings.otlp_traces_endpoint
    if endpoint is None:
        return contextlib.nullcontext(app)
    from jdllm.api.otel import traced  # it needs an extra

    return traced(app, endpoint, settings.names[0], prompts=settings.log_prompts)
