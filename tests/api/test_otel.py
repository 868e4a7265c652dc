"""Spans as a collector receives them."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from jdllm.api.app import create_app
from jdllm.api.otel import traced
from jdllm.api.service import Service
from tests.api.conftest import NAME
from tests.api.sse import events
from tests.api.undriven import stop_once_asked, undriven

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine-1"}
SECRET = "what nobody tells"
BODY = {"prompt": "12+3=", "max_tokens": 8}
"""Its answer ends before its last block does."""


class Export(NamedTuple):
    """What came at once.

    - `path`, `headers`: of the request.
    - `resource`: attributes of who sent it.
    """

    path: str
    headers: dict[str, str]
    resource: dict[str, Any]
    spans: list[Span]


class Collector(ThreadingHTTPServer):
    """Takes spans at any free port."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Taking)
        self.exports: list[Export] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    @property
    def spans(self) -> list[Span]:
        """All that came."""
        return [span for export in self.exports for span in export.spans]


class _Taking(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        spans = [span for scope in of_resource.scope_spans for span in scope.spans]
        resource, headers = values(of_resource.resource.attributes), dict(self.headers)
        self.server.exports.append(Export(self.path, headers, resource, spans))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def values(attributes: Any) -> dict[str, Any]:
    """Attributes by their names; a list as the last of its values."""
    found = {}
    for one in attributes:
        value = one.value.array_value.values[-1] if one.value.HasField("array_value") else one.value
        found[one.key] = getattr(value, value.WhichOneof("value"))
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@contextlib.contextmanager
def traced_client(service: Service, collector: Collector, **options: bool) -> Iterator[TestClient]:
    """A client whose requests are traced; once it is left, all spans have come."""
    with traced(create_app(service), collector.url, NAME, **options) as app, TestClient(app) as client:
        yield client


def check_times(told: dict[str, Any]) -> None:
    names = ("time_in_queue", "time_to_first_token", "e2e")
    queue, first, end = (told[f"gen_ai.latency.{name}"] for name in names)
    assert 0 <= queue <= first <= end


def test_a_request_is_a_span_below_its_client_s(service: Service, collector: Collector):
    with traced_client(service, collector) as client:
        answer = client.post("/v1/completions", json=BODY | {"n": 2}, headers=CALLED).json()
    [span], told = collector.spans, values(collector.spans[0].attributes)
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert told["http.route"] == "/v1/completions"
    assert told["http.response.header.x-request-id"] == "mine-1"
    assert (told["gen_ai.request.id"], told["gen_ai.response.model"]) == (answer["id"], NAME)
    usage = answer["usage"]
    assert told["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] < 16
    assert told["jdllm.nfe"] == usage["forward_evaluations"]
    check_times(told)


def test_a_stream_is_a_span_until_its_end(service: Service, collector: Collector):
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    with traced_client(service, collector) as client:
        usage = events(client.post("/v1/completions", json=body).text)[-1][1]["usage"]
    [span], told = collector.spans, values(collector.spans[0].attributes)
    assert span.parent_span_id == b""
    assert told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert told["jdllm.nfe"] == usage["forward_evaluations"]
    check_times(told)


def test_every_route_of_the_model_has_spans_and_no_other(
    service: Service, collector: Collector, mask_id: int
):
    messages = [{"role": "user", "content": "1"}]
    asked = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/responses": {"input": "1", "max_output_tokens": 4},
        "/v1/infill": {"token_ids": [49, mask_id]},
    }
    with traced_client(service, collector) as client:
        for path, body in asked.items():
            assert client.post(path, json=body).status_code == 200
        client.get("/health")
        client.get("/v1/models")
    told = [values(span.attributes) for span in collector.spans]
    assert [one["http.route"] for one in told] == [*asked]
    for one in told:
        check_times(one)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_is_an_error(service: Service, collector: Collector, stream: bool):
    with undriven(service) as stopped, traced_client(stopped, collector) as client:
        assert client.portal is not None
        client.portal.start_task_soon(stop_once_asked, stopped)
        client.post("/v1/completions", json=BODY | {"stream": stream}, headers=CALLED)
    [span], told = collector.spans, values(collector.spans[0].attributes)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert told["error.type"] == "server_stopping"
    assert "the server stops" in span.status.message
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (5, 0)
    assert "gen_ai.latency.time_to_first_token" not in told
    assert span.parent_span_id.hex() == PARENT


@pytest.mark.parametrize("prompts", [False, True])
def test_a_refusal_says_what_clients_wrote_only_where_that_may_be_told(
    service: Service, collector: Collector, prompts: bool
):
    with traced_client(service, collector, prompts=prompts) as client:
        client.post("/v1/completions", json={"prompt": "1", "temperature": SECRET})
    [span] = collector.spans
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.status.message.startswith("invalid_value: temperature")
    assert (SECRET in str(span)) is prompts


def test_the_environment_names_the_service_and_adds_headers(
    service: Service, collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    def export() -> Export:
        with traced_client(service, collector) as client:
            client.post("/v1/completions", json={"temperature": SECRET})
        return collector.exports[-1]

    assert export().resource["service.name"] == "jdllm"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=let-me-in")
    named = export()
    assert (named.path, named.headers["x-token"]) == ("/v1/traces", "let-me-in")
    assert named.resource["service.name"] == "mine"


@pytest.mark.slow
def test_a_server_without_spans_needs_no_sdk():
    code = "import sys, jdllm.api.server, jdllm.cli.serve; assert 'opentelemetry.sdk' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
