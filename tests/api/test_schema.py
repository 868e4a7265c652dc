import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.api.app import create_app
from jdllm.api.service import Service
from jdllm.decoding.registry import rule_names
from jdllm.decoding.sampling import SamplingParams

REQUESTS = ("CompletionRequest", "ChatRequest", "ResponsesRequest", "InfillRequest")


@pytest.fixture
def sampling(service: Service) -> SamplingParams:
    return service.settings.default_sampling.changed(gen_length=16, steps=8, temperature=0.5, stop=["a"])


@pytest.fixture
def changed(service: Service, sampling: SamplingParams) -> Iterator[TestClient]:
    """A server with parameters of its own."""
    settings = dataclasses.replace(service.settings, default_sampling=sampling)
    made = Service(service.llm, service.engine, settings, service.metrics)
    with TestClient(create_app(made)) as client:
        yield client
    made.close()


def properties(client: TestClient, name: str) -> dict[str, Any]:
    return client.get("/openapi.json").json()["components"]["schemas"][name]["properties"]


def test_what_the_schema_shows_is_what_holds(changed: TestClient):
    shown = properties(changed, "CompletionRequest")
    answer = changed.post("/v1/completions", json={"prompt": "1+1=", "ignore_eos": True}).json()
    assert shown["gen_length"]["default"] == answer["usage"]["completion_tokens"] == 16
    assert shown["steps"]["default"] == answer["choices"][0]["nfe"] == 8


@pytest.mark.parametrize("name", REQUESTS)
def test_a_server_shows_its_own_parameters(changed: TestClient, sampling: SamplingParams, name: str):
    shown = properties(changed, name)
    for field in ("gen_length", "temperature"):
        assert shown[field]["default"] == getattr(sampling, field)
        assert shown[field]["description"].endswith(f"[default: {getattr(sampling, field)}]")
    assert shown["early_stop"]["default"] is True
    assert shown["stop"]["default"] == ["a"]
    # Masks of clients are denoised in as many steps as they need, and seeds are drawn.
    assert shown["steps"].get("default") == (None if name == "InfillRequest" else 8)
    assert shown["seed"].get("default") is None
    assert "default: 0" not in shown["seed"]["description"]
    assert "default: 128" not in str(shown)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_server_without_a_verifier_does_not_list_what_needs_one(client: TestClient, name: str):
    shown = properties(client, name)
    listed = [choice for kind in shown["transfer"]["anyOf"] for choice in kind.get("enum", ())]
    others = ("adaptive", "lossy_speculation")  # the latter is for block models
    assert listed == [rule for rule in rule_names("transfer") if rule not in others]
    assert not {"mixture_weight", "max_lookahead", "verify_policy"} & shown.keys()
    assert {"threshold", "temperature", "retention"} <= shown.keys()


@pytest.mark.parametrize("rule", rule_names("transfer"))
def test_the_listed_rules_are_those_that_are_answered(client: TestClient, rule: str):
    body = {"prompt": "1+1=", "max_tokens": 4, "transfer": rule}
    answered = client.post("/v1/completions", json=body).status_code == 200
    assert answered == (rule in str(properties(client, "CompletionRequest")["transfer"]["anyOf"]))
