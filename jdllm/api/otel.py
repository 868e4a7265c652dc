"""Spans of requests, sent to a collector of OpenTelemetry.

This needs the extra `otel`: only a server that sends spans imports this.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from starlette.types import ASGIApp, Receive, Scope, Send

from jdllm import __version__
from jdllm.api.errors import ApiError
from jdllm.api.metrics import ENDPOINTS
from jdllm.api.request_log import reason
from jdllm.api.running import CallEnd

_NAME = "llm_request"
"""As vLLM calls such spans."""


@contextlib.contextmanager
def traced(app: ASGIApp, endpoint: str, model: str, *, prompts: bool = False) -> Iterator[ASGIApp]:
    """The application with a span around each request of the model; leaving `with` sends the last spans.

    Arguments:
    - `app`: of `create_app`.
    - `endpoint`: URL that takes spans by OTLP over HTTP, such as `http://localhost:4318/v1/traces`.
    - `model`: as clients call it.
    - `prompts`: whether what clients wrote may be told.
    """
    service = {SERVICE_NAME: "jdllm", SERVICE_VERSION: __version__}
    # What the environment says of the service is put last: it stands above these.
    resource = Resource.create({**service, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    try:
        yield _Spans(app, provider.get_tracer("jdllm", __version__), model, prompts)
    finally:
        provider.shutdown()


class _Spans:
    """Opens a span when a request of the model arrives, and closes the span when the answer has been given.

    Arguments:
    - `model`: as clients call it.
    - `prompts`: whether what clients wrote may be told.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer, model: str, prompts: bool):
        self._app, self._tracer, self._model, self._prompts = app, tracer, model, prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ENDPOINTS:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        known = {"http.route": scope["path"], "gen_ai.response.model": self._model}
        with self._tracer.start_as_current_span(_NAME, extract(headers), SpanKind.SERVER, known) as span:
            await self._app(scope, receive, send)
            self._tell(span, scope["state"])

    def _tell(self, span: Span, state: dict[str, Any]) -> None:
        """What `RequestLog` and `Running` left in the state of a request, as attributes."""
        span.set_attribute("http.response.header.x-request-id", [state["request_id"]])
        call: CallEnd | None = state.get("call")
        if call is not None:
            span.set_attributes(_attributes(call))
        error: ApiError | None = state.get("error")
        if error is not None:
            span.set_attribute("error.type", error.code or str(error.status))
            span.set_status(StatusCode.ERROR, reason(error, self._prompts))


def _attributes(call: CallEnd) -> dict[str, str | int | float]:
    """By the names that vLLM uses, and our own."""
    told = {
        "gen_ai.request.id": call.id,
        "gen_ai.usage.prompt_tokens": call.prompt_tokens,
        "gen_ai.usage.completion_tokens": call.completion_tokens,
        "gen_ai.latency.time_in_queue": call.queued,
        "gen_ai.latency.time_to_first_token": call.first_block,
        "gen_ai.latency.e2e": call.seconds,
        "jdllm.nfe": call.evaluations,
    }
    return {name: value for name, value in told.items() if value is not None}
