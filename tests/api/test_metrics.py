"""What Prometheus reads: values against what was asked of the engine, and the dashboard against the names."""

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from jdllm.api.metrics import ENDPOINTS, Metrics
from jdllm.api.service import Service
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.ladder import TILE_ROWS
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from tests.engines import engine_of, finish, generation_request

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
NAME = "tiny"


@pytest.fixture
def engine(params: Params, config: ModelConfig, executables: Executables) -> Engine:
    return engine_of(params, config, executables, 128, pages=3)


@pytest.fixture
def metrics(engine: Engine, executables: Executables) -> Metrics:
    made = Metrics(NAME, engine, executables)
    engine.observe = made.observe_part
    return made


@pytest.fixture
def make(config: ModelConfig) -> Callable[[int], Request]:
    """A request with a prompt of so many tokens that generates eight, one a step, in two blocks."""
    sampling = SamplingParams(gen_length=8, block_length=4, early_stop=False, cache="dual")
    return lambda length: generation_request(0, np.arange(1, length + 1), sampling, config)


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.slow
def test_work_is_that_of_the_requests(engine, metrics, make):
    finish(engine, [make(5)], updates="every")
    found = values(metrics)
    expected = {
        ("jdllm_tokens_total",): 8,
        ("jdllm_forward_evaluations_total",): 8,
        ("jdllm_tokens_per_forward",): 1,
        ("jdllm_requests_ended_total", "finished"): 1,
        ("jdllm_requests_ended_total", "failed"): 0,
        ("jdllm_parts_total", "full"): 0,
        ("jdllm_parts_total", "refresh"): 2,
        ("jdllm_parts_total", "reuse"): 6,
        ("jdllm_rows_total", "refresh"): 2 * 13,
        ("jdllm_rows_total", "reuse"): 6 * TILE_ROWS,
        ("jdllm_head_rows_total", "refresh"): 2 * 4,
        ("jdllm_head_rows_total", "reuse"): 2 * (3 + 2 + 1),
        ("jdllm_part_seconds_count", "reuse"): 6,
        ("jdllm_part_rows_count", "refresh"): 2,
        ("jdllm_part_rows_sum", "refresh"): 2 * 13,
        ("jdllm_part_rows_bucket", "refresh", "16.0"): 2,
        ("jdllm_info", NAME, version("jdllm")): 1,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_part_times_and_idle_times_are_those_that_the_engine_tells(engine, metrics, make):
    parts: list[Any] = []

    def observe(part: Any) -> None:
        parts.append(part)
        metrics.observe_part(part)

    engine.observe = observe
    finish(engine, [make(5)], updates="every")
    found = values(metrics)
    for kind in ("refresh", "reuse"):
        own = [part.seconds for part in parts if part.kind.name.lower() == kind]
        assert found["jdllm_part_seconds_sum", kind] == pytest.approx(sum(own))
    assert found["jdllm_device_idle_seconds_total",] == pytest.approx(sum(part.idle for part in parts))
    assert found["jdllm_device_idle_seconds_total",] > 0


def test_gauges_are_read_while_requests_are_there(engine, metrics, make):
    """The pool has two pages, of which each request takes one; a third request waits."""
    before = values(metrics)
    for _ in range(3):
        engine.add(make(20).spec, updates="every")
    engine.step()
    found = values(metrics)
    for state, count in (("running", 2), ("waiting", 1)):
        for key in ((f"jdllm_requests_{state}",), (f"vllm:num_requests_{state}", NAME)):
            assert (before[key], found[key]) == (0, count)
    assert (before["jdllm_kv_pages_used",], found["jdllm_kv_pages_used",]) == (0, 2)
    assert found["jdllm_kv_pages",] == 2
    assert (before["vllm:kv_cache_usage_perc", NAME], found["vllm:kv_cache_usage_perc", NAME]) == (0, 1)
    while not engine.idle:
        engine.step()
    assert values(metrics)["vllm:kv_cache_usage_perc", NAME] == 0


def test_a_pool_without_pages_is_not_in_use(params, config, executables):
    engine = engine_of(params, config, executables, 128, pages=1)
    found = values(Metrics(NAME, engine, executables))
    assert (found["jdllm_kv_pages",], found["vllm:kv_cache_usage_perc", NAME]) == (0, 0)


def test_compiling_is_counted_where_it_happens(engine):
    class Counted:
        compiled, loaded = 3, 4

    counted: Any = Counted()
    found = values(Metrics(NAME, engine, counted))
    assert found["jdllm_executables_compiled_total",] == 3
    assert found["jdllm_executables_loaded_total",] == 4


class TestRequests:
    def test_each_that_ended_counts_and_times_are_those_of_answers(self, metrics):
        metrics.request_ended("/v1/completions", 200, 0.3, 0.04, 5, 8)
        metrics.request_ended("/v1/completions", 200, 3.0, None, 2, 1)
        metrics.request_ended("/v1/completions", 429, 7.0, 7.0, 0, 0)
        found, name = values(metrics), "/v1/completions"
        assert found["jdllm_http_requests_total", name, "200"] == 2
        assert found["jdllm_http_requests_total", name, "429"] == 1
        assert found["jdllm_request_seconds_count", name] == 2
        assert found["jdllm_request_seconds_sum", name] == pytest.approx(3.3)
        at_most = [found["jdllm_request_seconds_bucket", name, le] for le in ("0.2", "0.5", "2.0", "5.0")]
        assert at_most == [0, 1, 1, 2]
        assert found["jdllm_first_block_seconds_count", name] == 1
        assert found["jdllm_first_block_seconds_sum", name] == pytest.approx(0.04)
        assert found["jdllm_prompt_tokens_total", name] == 7
        assert found["jdllm_completion_tokens_total", name] == 9

    def test_a_call_has_a_time_to_its_first_tokens_with_a_stream_and_without(
        self, client: TestClient, service: Service
    ):
        name, body = "vllm:time_to_first_token_seconds", {"prompt": "1", "max_tokens": 2}
        before = values(service.metrics)[f"{name}_count", "demo"]
        for count, stream in enumerate((False, True), start=1):
            client.post("/v1/completions", json=body | {"stream": stream})
            found = values(service.metrics)
            assert found[f"{name}_count", "demo"] == before + count
            assert 0 < found[f"{name}_sum", "demo"] <= found["vllm:e2e_request_latency_seconds_sum", "demo"]

    def test_generated_tokens_are_those_of_the_answer(self, client: TestClient, service: Service):
        """The text ends before its block does, and the model writes on to the end of the block."""
        body = {"prompt": "12+3=", "max_tokens": 8}
        before = values(service.metrics)["vllm:generation_tokens_total", "demo"]
        usage = client.post("/v1/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] < 8
        found = values(service.metrics)["vllm:generation_tokens_total", "demo"]
        assert found == before + usage["completion_tokens"]

    def test_clients_cannot_make_up_labels(self, metrics):
        for endpoint in ENDPOINTS:
            metrics.request_ended(endpoint, 200, 1.0, 1.0, 1, 1)
        before = len(metrics.render().splitlines())
        for n in range(100):
            metrics.request_ended(f"/v1/{n}", 404, 1.0, None, 0, 0)
        found = values(metrics)
        assert found["jdllm_http_requests_total", "other", "404"] == 100
        assert len(metrics.render().splitlines()) - before < 10


def test_two_servers_share_nothing(engine, executables, metrics):
    other = Metrics("other", engine, executables)
    metrics.request_ended("/v1/score", 200, 1.0, None, 1, 0)
    assert ("jdllm_http_requests_total", "/v1/score", "200") not in values(other)
    assert not any(family.name.startswith("jdllm") for family in REGISTRY.collect())


class TestDashboard:
    """docs/grafana.json beside what a server with some traffic answers."""

    @pytest.fixture
    def names(self, engine, metrics, make) -> set[str]:
        finish(engine, [make(5)])
        metrics.request_ended("/v1/completions", 200, 0.3, 0.04, 5, 8)
        return {name for name, *_ in values(metrics)}

    @pytest.fixture
    def dashboard(self) -> dict[str, Any]:
        return json.loads(DASHBOARD.read_text())

    def expressions(self, dashboard: dict[str, Any]) -> list[str]:
        return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]

    def test_it_asks_for_metrics_that_there_are_and_for_all_of_ours(self, dashboard, names):
        asked = set(re.findall(r"[a-z0-9:_]+(?=\{)", " ".join(self.expressions(dashboard))))
        assert asked <= names
        ends = ("_created", "_bucket", "_sum", "_count")
        ours = {name for name in names if name.startswith(("jdllm", "vllm:")) and not name.endswith(ends)}
        histograms = {name for name in names if name.endswith("_bucket")}
        assert ours | histograms <= asked

    def test_labels_that_it_sums_by_are_there(self, dashboard, metrics, names):
        text = metrics.render().decode()
        for labels in re.findall(r"by \(([^)]+)\)", " ".join(self.expressions(dashboard))):
            for label in labels.split(", "):
                assert f'{label}="' in text

    def test_it_can_be_imported_for_any_data_source(self, dashboard):
        assert dashboard["id"] is None
        variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
        assert variables["datasource"]["type"] == "datasource"
        assert {
            variable for text in self.expressions(dashboard) for variable in re.findall(r"\$\w+", text)
        } == {
            "$instance",
            "$__rate_interval",
        }
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        shown = [panel for panel in panels if panel["type"] != "row"]
        assert all(panel["datasource"]["uid"] == "${datasource}" for panel in shown)

    def test_panels_do_not_overlap(self, dashboard):
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            x, y, w, h = (panel["gridPos"][name] for name in "xywh")
            cells = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
            assert x + w <= 24
            assert not cells & taken
            taken |= cells
