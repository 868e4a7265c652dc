"""Adaptive parallel decoding over HTTP: a server with a verifier, and one without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.api.sse import events
from tests.api.words_server import served
from tests.causal_texts import words, write_speaking
from tests.conftest import BUDGET, KV_POOL

pytestmark = pytest.mark.usefixtures("shared_executables")

PROMPT, MASK = [5, 17, 300, 44], 509
FIELDS: dict[str, Any] = {"transfer": "adaptive", "mixture_weight": 0.8, "max_lookahead": 4, "seed": 3}
SIZES: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": BUDGET, "kv_pool": KV_POOL}


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking(tmp_path_factory.mktemp("dream"), "dream", "none")


@pytest.fixture(scope="module")
def llm(dream: Path, tmp_path_factory: pytest.TempPathFactory, shared_executables: None) -> Iterator[LLM]:
    verifier = write_speaking(tmp_path_factory.mktemp("qwen2"), "qwen2", "none")
    with LLM(dream, verifier=verifier, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    with served(llm) as client:
        yield client


def tokens(llm: LLM, **fields: Any) -> list[int]:
    """What the library generates."""
    sampling = llm.default_sampling().changed(**{"max_tokens": 12, "early_stop": False, **FIELDS, **fields})
    return llm.generate(prompt_token_ids=[PROMPT], sampling=sampling)[0].token_ids


def completion(client: TestClient, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


CACHED: dict[str, Any] = {"cache": "dual", "block_length": 4}


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.0}, {"mixture_weight": 0.0, "max_lookahead": 9}, CACHED]
)
def test_a_completion_is_what_the_library_gives(client: TestClient, llm: LLM, fields: dict[str, Any]):
    asked = {"temperature": 0.0, **FIELDS, **fields}
    choice = completion(client, **asked).json()["choices"][0]
    assert choice["token_ids"] == tokens(llm, **asked)
    assert (choice["nfe"] < 12) is (asked["mixture_weight"] > 0)


def test_the_schema_lists_it(client: TestClient):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    shown = schemas["CompletionRequest"]["properties"]
    assert "adaptive" in shown["transfer"]["anyOf"][0]["enum"]
    assert shown["mixture_weight"]["x-used-when"] == {"transfer": ["adaptive"]}


def test_a_stream_has_the_same_text(client: TestClient, llm: LLM):
    told = events(completion(client, **FIELDS, stream=True).text)
    assert len(told) > 2, "each step is told of"
    assert "".join(part["choices"][0]["text"] for _, part in told) == f" {words(*tokens(llm))}"


def test_every_step_is_an_event(client: TestClient, llm: LLM):
    """A step drafts a window, and the verifier accepts its beginning."""
    told = events(completion(client, **FIELDS, stream=True, stream_mode="denoise").text)
    steps = [event for name, event in told if name == "step"]
    accepted = [
        token
        for step in steps
        for token, committed in zip(step["token_ids"], step["committed"], strict=True)
        if committed
    ]
    assert accepted == tokens(llm)
    assert any(not all(step["committed"]) for step in steps)


def test_masks_are_filled_in_their_places(client: TestClient, llm: LLM):
    ids = [5, MASK, 7, MASK, MASK, 9]
    sampling = SamplingParams(**FIELDS)
    expected = llm.infill(token_ids=[ids], sampling=sampling)[0].token_ids
    answer = client.post("/v1/infill", json={"token_ids": ids, **FIELDS})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected


def test_defaults_for_other_rules_give_way(llm: LLM):
    """Published files of Dream name an order."""
    with served(llm, SamplingParams(alg="origin", steps=16, top_p=0.9)) as client:
        choice = completion(client, **FIELDS).json()["choices"][0]
    assert choice["token_ids"] == tokens(llm)


def test_a_servers_own_sampling_may_be_adaptive(llm: LLM):
    with served(llm, llm.default_sampling().changed(**FIELDS)) as client:
        assert completion(client, seed=3).json()["choices"][0]["token_ids"] == tokens(llm)
        other = completion(client, transfer="schedule").json()["choices"][0]
        assert other["nfe"] == 12


def test_without_a_verifier_it_is_refused(dream: Path):
    with LLM(dream, **SIZES) as llm, served(llm) as client:
        for body in ({"prompt": PROMPT}, {"prompt": PROMPT, "stream": True}):
            answer = client.post("/v1/completions", json={"max_tokens": 4, **body, **FIELDS})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "transfer"
            assert error["message"].endswith("or start jdllm serve with --verifier")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache": "head_sparse"}, "transfer"),
        ({"suffix_window": 4}, "transfer"),
        ({"cache": "dual", "official_forcing": True}, "transfer"),
        ({"mixture_weight": 1.5}, "mixture_weight"),
        ({"transfer": "schedule"}, "mixture_weight"),
    ],
)
def test_what_does_not_go_with_it_is_refused(client: TestClient, fields: dict[str, Any], param: str):
    body = {"prompt": PROMPT, "max_tokens": 8, **FIELDS, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
