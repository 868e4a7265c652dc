import math

import pytest
from fastapi.testclient import TestClient

from jdllm.api.app import create_app
from jdllm.api.metrics import Metrics
from jdllm.api.service import Service, Settings
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.demo import checkpoint_path
from jdllm.llm import LLM
from jdllm.serving.async_engine import AsyncEngine
from tests.api.sse import events
from tests.conftest import KV_POOL


def infill(client, **body):
    answer = client.post("/v1/infill", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_masks_in_a_text_are_filled_as_by_the_library(client, demo: LLM, tokenizer: Tokenizer, mask_id: int):
    mask = tokenizer.token(mask_id)
    texts = [f"12+3{mask}=46", f"{mask}{mask}+1={mask}"]
    expected = demo.infill(texts)
    answer = infill(client, text=texts)
    assert [choice["token_ids"] for choice in answer["choices"]] == [output.token_ids for output in expected]
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in expected]
    places = [[(slot["start"], slot["stop"]) for slot in choice["slots"]] for choice in answer["choices"]]
    assert places == [[(4, 5)], [(0, 2), (5, 6)]]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7 + 3, 1 + 3)
    for choice in answer["choices"]:
        for slot in choice["slots"]:
            assert slot["token_ids"] == choice["token_ids"][slot["start"] : slot["stop"]]
            assert all(logprob <= 0 for logprob in slot["logprobs"])
            assert all(step < choice["nfe"] for step in slot["committed_in"])


def test_ids_with_masks(client, demo: LLM, tokenizer: Tokenizer, mask_id: int):
    ids = [*tokenizer.encode("1+1="), mask_id]
    (expected,) = demo.infill(token_ids=[ids])
    assert infill(client, token_ids=ids)["choices"][0]["token_ids"] == expected.token_ids


def test_a_choice_is_the_likeliest_option(client, demo: LLM, tokenizer: Tokenizer):
    options = ["5", "579", "600"]
    answer = infill(client, parts=["123+456=", {"type": "choice", "options": options}])
    (choice,) = answer["choices"]
    (slot,) = choice["slots"]
    found = demo.choose(tokenizer.encode("123+456="), [tokenizer.encode(o) for o in options], [])
    assert [option["text"] for option in slot["options"]] == options
    assert [option["logprob"] for option in slot["options"]] == pytest.approx(found.logprobs)
    assert math.fsum(option["probability"] for option in slot["options"]) == pytest.approx(1)
    assert slot["chosen"] == found.best
    assert choice["text"] == f"123+456={options[found.best]}"
    assert choice["nfe"] == 0


def test_slots_of_both_kinds_stand_in_order(client, demo: LLM):
    parts = ["1", {"type": "text", "max_tokens": 1}, "1=", {"type": "choice", "options": ["2", "9"]}, "."]
    (choice,) = infill(client, parts=parts)["choices"]
    text, picked = choice["slots"]
    assert (text["type"], text["start"], text["stop"]) == ("text", 1, 2)
    assert (picked["type"], picked["start"], picked["stop"]) == ("choice", 4, 5)
    assert choice["text"] == f"1{text['text']}1={picked['options'][picked['chosen']]['text']}."


@pytest.mark.parametrize(
    "parts", [["1+", {"type": "text", "max_tokens": 2}], [{"type": "choice", "options": ["a"]}]]
)
def test_a_stream_ends_with_the_slots(client, parts):
    body = {"parts": parts, "seed": 1}
    whole = infill(client, **body)["choices"][0]
    answer = client.post("/v1/infill", json=body | {"stream": True})
    name, end = events(answer.text)[-1]
    assert name == "end"
    assert (end["slots"], end["text"]) == (whole["slots"], whole["text"])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "parts": ["b"]},
        {"text": "no mask"},
        {"parts": ["no slot"]},
        {"parts": [{"type": "choice", "options": []}]},
        {"parts": [{"type": "text", "max_tokens": 0}]},
        {"parts": [{"type": "text", "max_tokens": 2**20}]},
        {"parts": [{"type": "text", "max_tokens": 1}], "stream": True, "stream_mode": "text"},
    ],
)
def test_a_mistake_is_refused(client, body):
    assert client.post("/v1/infill", json=body).status_code == 400


@pytest.mark.slow
def test_scores_are_the_library_s(client, demo: LLM):
    body = {"prompt": "1+1=", "answers": ["2", "31"], "mc_num": 32, "batch_size": 8, "seed": 3}
    answer = client.post("/v1/score", json=body).json()
    for text, score in zip(body["answers"], answer["scores"], strict=True):
        expected = demo.score("1+1=", text, mc_num=32, batch_size=8, seed=3)
        assert score["log_likelihood"] == pytest.approx(expected, rel=1e-4)
        assert score["standard_error"] >= 0
        assert (score["mc_num"], score["tokens"]) == (32, len(text))
    assert [score["index"] for score in answer["scores"]] == [0, 1]


@pytest.mark.parametrize("extra", [{"answers": []}, {"answers": [""]}, {"mc_num": 0}, {"answers": [[99999]]}])
def test_scores_of_what_is_none_are_refused(client, extra):
    assert client.post("/v1/score", json={"prompt": "a", "answers": ["b"]} | extra).status_code == 400


@pytest.mark.slow
def test_after_a_warm_up_no_endpoint_compiles_anything():
    """The counter that docs/serving.md sets an alarm on."""
    with LLM(checkpoint_path(), max_num_batched_tokens=128, kv_pool=KV_POOL, warmup=True) as llm:
        engine, metrics = AsyncEngine(llm.engine), Metrics("demo", llm.engine, llm.executables)
        service = Service(llm, engine, Settings(("demo",), llm.default_sampling()), metrics)
        compiled = llm.executables.compiled
        prompt = {"prompt": "12+34=", "max_tokens": 16}
        asked = [
            ("completions", prompt),
            ("completions", {**prompt, "n": 9, "cache": "dual"}),
            ("completions", {**prompt, "temperature": 0.8, "top_k": 5, "logprobs": 1}),
            ("completions", {"prompt": "12+34=46", "echo": True, "logprobs": 1, "max_tokens": 1}),
            ("score", {"prompt": "1+1=", "answers": ["2", "3 or 4"], "mc_num": 9}),
            ("score", {"prompt": "1+1=" * 3, "answers": ["2" * 20], "cfg_scale": 0.5, "mc_num": 5}),
            ("infill", {"parts": ["12+34=", {"type": "choice", "options": ["46", "4", "999"]}]}),
        ]
        with TestClient(create_app(service)) as client:
            for endpoint, body in asked:
                answer = client.post(f"/v1/{endpoint}", json=body)
                assert answer.status_code == 200, (endpoint, answer.text)
                assert llm.executables.compiled == compiled, (endpoint, body)
        service.close()
        engine.close()
