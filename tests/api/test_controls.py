"""Fields that control logits, over HTTP: as by the library, and mistakes in them."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.api.sse import events
from tests.helpers import slow

DIGITS = list(range(48, 58))
PROMPT = "12+30="
USER = {"role": "user", "content": PROMPT}
CONTROLS: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {"53": 30, "54": -100}},
    "allowed_token_ids": {"allowed_token_ids": DIGITS},
    "min_tokens": {"min_tokens": 6},
    "bad_words": {"bad_words": ["2", "4"]},
}


def refused(client: TestClient, route: str, **body: Any) -> dict[str, Any]:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    "field", ["min_tokens", slow("logit_bias"), slow("allowed_token_ids"), slow("bad_words")]
)
def test_completions_are_those_of_the_library(client: TestClient, demo: LLM, field: str):
    own = CONTROLS[field]
    [expected] = demo.generate(PROMPT, SamplingParams(max_tokens=8, seed=1, **own))
    [free] = demo.generate(PROMPT, SamplingParams(max_tokens=8, seed=1))
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "seed": 1} | own)
    assert answer.json()["choices"][0]["token_ids"] == expected.token_ids != free.token_ids


def test_a_conversation(client: TestClient):
    body = {"messages": [USER], "max_tokens": 4, "allowed_token_ids": [57], "logit_bias": {"57": 1.5}}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "9999"
    assert answer["choices"][0]["finish_reason"] == "length"
    listed = {"logprobs": True, "top_logprobs": 3}
    answer = client.post("/v1/chat/completions", json=body | listed).json()
    for place in answer["choices"][0]["logprobs"]["content"]:
        assert place["logprob"] == 0
        assert [top["token"] for top in place["top_logprobs"]] == ["9"]


def test_words(client: TestClient):
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 1}
    [free, without] = [
        client.post("/v1/completions", json=body | own).json()["choices"][0]["text"]
        for own in ({}, {"bad_words": ["4"]})
    ]
    assert "4" in free
    assert without
    assert "4" not in without


@pytest.mark.slow
def test_a_stream(client: TestClient):
    body = {"prompt": PROMPT, "max_tokens": 4, "allowed_token_ids": DIGITS, "stream": True}
    chunks = events(client.post("/v1/completions", json=body).text)
    text = "".join(chunk["choices"][0]["text"] for _, chunk in chunks if isinstance(chunk, dict))
    assert len(text) == 4
    assert text.isdigit()


def test_slots(client: TestClient):
    body = {"parts": ["1+1=", {"type": "text", "max_tokens": 2}], "allowed_token_ids": [55]}
    answer = client.post("/v1/infill", json=body).json()
    assert answer["choices"][0]["text"] == "1+1=77"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bias outside": ({"logit_bias": {"100000": 1}}, "logit_bias has 100000, outside the vocabulary"),
    "large bias": ({"logit_bias": {"5": 101}}, "token ids with numbers from -100 to 100"),
    "bias of no id": ({"logit_bias": {"five": 1}}, "token ids with numbers from -100 to 100"),
    "bias of no number": ({"logit_bias": {"5": "1"}}, "token ids with numbers from -100 to 100"),
    "list": ({"logit_bias": [5]}, "token ids with numbers from -100 to 100"),
    "nothing allowed": ({"allowed_token_ids": []}, "allowed_token_ids is []: at least one token id"),
    "allowed outside": ({"allowed_token_ids": [100000]}, "allowed_token_ids has 100000, outside"),
    "allowed text": ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0] is '5'"),
    "only the end": ({"allowed_token_ids": [257], "min_tokens": 1}, "allowed_token_ids leaves no token"),
    "no word": ({"bad_words": [5]}, "texts or lists of token ids"),
    "empty word": ({"bad_words": ["a", ""]}, "texts or lists of token ids"),
    "word of several tokens": ({"bad_words": ["42"]}, "bad_words has a word of 2 tokens"),
    "negative": ({"min_tokens": -1}, "min_tokens is -1"),
    "too many": ({"min_tokens": 9}, "min_tokens is 9, more than the 8 tokens of the answer"),
}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_names_its_field(client: TestClient, route: str, case: str):
    own, message = WRONG[case]
    asked = {"prompt": PROMPT} if route == "/v1/completions" else {"messages": [USER]}
    error = refused(client, route, **asked, max_tokens=8, **own)
    assert message in error["message"]
    assert error["param"] == next(iter(own))


def test_slots_have_no_minimum(client: TestClient):
    body = {"parts": ["1+1=", {"type": "text", "max_tokens": 2}], "min_tokens": 1}
    assert "leave min_tokens out" in refused(client, "/v1/infill", **body)["message"]
