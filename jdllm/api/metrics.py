"""What monitoring reads, as Prometheus' text: the engine's counts as they are, and times of what ended."""

import collections
import math
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jdllm import __version__
from jdllm.compiling.executables import Executables
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.updates import PartDone, Stats

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/infill", "/v1/score")
"""Paths that are told apart; any other is `other`, so that clients cannot make up label values."""

_PART_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 100)
_REQUEST_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_ROWS = tuple(2**n for n in range(4, 18))


class Metrics:
    """The metrics of one server, in a registry of its own.

    Arguments:
    - `model_name`: as clients call it.
    - `engine`: whose counts are read whenever somebody asks.
    - `executables`: what is compiled.

    `observe_part` and `request_ended` may be called by any thread, and so may `render`.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str, engine: Engine, executables: Executables):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCounts(model_name, engine, executables))
        ProcessCollector(registry=self._registry)
        part_seconds = self._histogram(
            "part_seconds", "Seconds from the submission of a part to its collection.", _PART_SECONDS, "kind"
        )
        part_rows = self._histogram(
            "part_rows", "Packed rows of the requests of a part, in one step.", _ROWS, "kind"
        )
        self._parts = {
            kind: (part_seconds.labels(_name(kind)), part_rows.labels(_name(kind))) for kind in Kind
        }
        self._device_idle = Counter(
            "jdllm_device_idle_seconds",
            "Seconds in which the device had nothing to do though there were requests.",
            registry=self._registry,
        )
        self._requests = self._counter(
            "http_requests", "Requests over HTTP that ended.", "endpoint", "status"
        )
        self._latency = self._histogram(
            "request_seconds", "Seconds that an answered request took.", _REQUEST_SECONDS, "endpoint"
        )
        self._first_block = self._histogram(
            "first_block_seconds",
            "Seconds until the first tokens of an answered request were committed.",
            _REQUEST_SECONDS,
            "endpoint",
        )
        # By the names of vLLM, which dashboards and autoscalers know.
        routers = {"labelnames": ("model_name",), "registry": self._registry}
        seconds = {"buckets": _REQUEST_SECONDS, **routers}
        latency = Histogram("vllm:e2e_request_latency_seconds", "Seconds that a request took.", **seconds)
        first = Histogram("vllm:time_to_first_token_seconds", "Seconds until its first tokens.", **seconds)
        read = Counter("vllm:prompt_tokens", "Tokens of prompts.", **routers)
        made = Counter("vllm:generation_tokens", "Tokens that were generated.", **routers)
        self._latencies, self._firsts = latency.labels(model_name), first.labels(model_name)
        self._read, self._made = read.labels(model_name), made.labels(model_name)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", "endpoint")
        self._completion_tokens = self._counter(
            "completion_tokens", "Tokens that were generated.", "endpoint"
        )

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"jdllm_{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...], label: str) -> Histogram:
        return Histogram(f"jdllm_{name}", what, (label,), registry=self._registry, buckets=buckets)

    def observe_part(self, part: PartDone) -> None:
        """Take in a part, as `Engine.observe` tells it."""
        seconds, rows = self._parts[part.kind]
        seconds.observe(part.seconds)
        rows.observe(part.rows)
        self._device_idle.inc(part.idle)

    def request_ended(
        self,
        endpoint: str,
        status: int,
        latency: float,
        first_block: float | None,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        """Take in a request over HTTP that has ended, however it did.

        Arguments:
        - `endpoint`: its path.
        - `status`: of the answer; only answers with 200 have times.
        - `latency`: seconds that it took.
        - `first_block`: seconds until tokens were committed, `None` where none were.
        - `prompt_tokens`, `completion_tokens`: that were read, and that were generated.
        """
        endpoint = endpoint if endpoint in ENDPOINTS else "other"
        self._requests.labels(endpoint, status).inc()
        self._prompt_tokens.labels(endpoint).inc(prompt_tokens)
        self._completion_tokens.labels(endpoint).inc(completion_tokens)
        self._read.inc(prompt_tokens)
        self._made.inc(completion_tokens)
        if status == 200:
            self._latency.labels(endpoint).observe(latency)
            self._latencies.observe(latency)
            if first_block is not None:
                self._first_block.labels(endpoint).observe(first_block)
                self._firsts.observe(first_block)

    def http(self) -> dict[str, Any]:
        """What the page of figures shows of requests over HTTP, over all paths.

        Returns `statuses`, how many ended with each; and for answers with 200 `seconds`, their sum, and
        `within`, pairs of a time and how many took at most that long; the last time is `None`, any.
        """
        statuses, within = collections.Counter(), collections.Counter()
        for sample in _samples(self._requests, "_total"):
            statuses[sample.labels["status"]] += int(sample.value)
        for sample in _samples(self._latency, "_bucket"):
            within[float(sample.labels["le"])] += int(sample.value)
        seconds = sum(sample.value for sample in _samples(self._latency, "_sum"))
        pairs = [(None if math.isinf(most) else most, count) for most, count in sorted(within.items())]
        return {"statuses": statuses, "seconds": seconds, "within": pairs}

    def render(self) -> bytes:
        """All of it, of the type `content_type`."""
        return generate_latest(self._registry)


def _samples(metric: Counter | Histogram, ending: str) -> Iterator[Sample]:
    return (one for family in metric.collect() for one in family.samples if one.name.endswith(ending))


class _EngineCounts(Collector):
    """Reads an engine when somebody asks, so that nothing is counted twice."""

    def __init__(self, model_name: str, engine: Engine, executables: Executables):
        self._model_name, self._engine, self._executables = model_name, engine, executables

    def collect(self) -> Iterator[Metric]:
        stats, executables = self._engine.stats(), self._executables
        yield InfoMetricFamily(
            "jdllm", "The server.", {"version": __version__, "model_name": self._model_name}
        )
        yield from self._for_routers(stats)
        yield from _requests(stats)
        yield from _pool(stats)
        yield from _work(stats)
        compiled = ("executables_compiled", "Executables that were compiled.", executables.compiled)
        loaded = ("executables_loaded", "Executables that were found compiled.", executables.loaded)
        yield from (_count(*row) for row in (compiled, loaded))

    def _for_routers(self, stats: Stats) -> Iterator[Metric]:
        """What routers between several servers know by these names."""
        used = _used(stats) / stats.pages if stats.pages else 0.0
        for name, what, value in (
            ("vllm:num_requests_running", "Requests that run.", stats.running),
            ("vllm:num_requests_waiting", "Requests that wait.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV pool that requests hold, from 0 to 1.", used),
        ):
            family = GaugeMetricFamily(name, what, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family


def _requests(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "jdllm_requests_running", "Requests of the engine, one for each sample, that run.", stats.running
    )
    yield GaugeMetricFamily("jdllm_requests_waiting", "Those that have not started.", stats.waiting)
    ended = CounterMetricFamily("jdllm_requests_ended", "Those that ended, and how.", labels=["how"])
    for how in ("finished", "failed", "aborted"):
        ended.add_metric([how], getattr(stats, how))
    yield ended


def _pool(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily("jdllm_kv_pages", "Pages of the KV pool.", stats.pages)
    yield GaugeMetricFamily("jdllm_kv_pages_used", "Pages that requests hold.", _used(stats))
    yield _count("kv_pool_rebuilt", "How often the KV pool was lost and made again.", stats.rebuilt)


def _work(stats: Stats) -> Iterator[Metric]:
    yield _count("tokens", "Tokens that were committed for good.", stats.tokens)
    yield _count("forward_evaluations", "Forward evaluations of the model.", stats.evaluated)
    yield GaugeMetricFamily(
        "jdllm_tokens_per_forward",
        "Tokens committed by a forward evaluation, on average since the start.",
        stats.tokens / max(stats.evaluated, 1),
    )
    for name, what, counts in (
        ("parts", "Parts of iterations that ran.", stats.parts),
        ("served", "Requests in evaluations: by forward evaluations they are requests in one.", stats.served),
        ("rows", "Packed rows of requests that were evaluated.", stats.rows),
        ("padding_rows", "Packed rows that were evaluated for nobody.", stats.padding),
        ("head_rows", "Rows of requests that met the head.", stats.head_rows),
        ("device_busy_seconds", "Seconds in which the device ran parts.", stats.busy),
        ("waited_seconds", "Seconds in which requests that could be served waited for a part.", stats.waited),
    ):
        family = CounterMetricFamily(f"jdllm_{name}", what, labels=["kind"])
        for kind, count in counts.items():
            family.add_metric([_name(kind)], count)
        yield family


def _count(name: str, what: str, value: int) -> Metric:
    return CounterMetricFamily(f"jdllm_{name}", what, value)


def _used(stats: Stats) -> int:
    return stats.pages - stats.free_pages


def _name(kind: Kind) -> str:
    return kind.name.lower()
