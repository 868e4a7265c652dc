"""What a server of a causal model says of given texts: scores, echoed prompts, choices."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.api.sse import events
from tests.api.words_server import served
from tests.causal_texts import BOS, words, write_speaking
from tests.conftest import BUDGET, KV_POOL

PROMPT, OTHER = [5, 17, 300, 44, 120], [7]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = write_speaking(tmp_path_factory.mktemp("speaking"), "mistral_swa", "added")
    with LLM(directory, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    with served(llm) as client:
        yield client


def post(client: TestClient, route: str, **body):
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_scores_are_exact(client, llm: LLM):
    answers = [words(7, 8), [9, 10, 11]]
    found = post(client, "/v1/score", prompt=words(*PROMPT), answers=answers)
    assert found["usage"]["forward_evaluations"] == 2
    for ids, score in zip(([7, 8], [9, 10, 11]), found["scores"], strict=True):
        assert score["log_likelihood"] == pytest.approx(llm.score([BOS, *PROMPT], ids), rel=1e-5)
        assert (score["standard_error"], score["mc_num"], score["tokens"]) == (0.0, 1, len(ids))


def test_an_empty_text_is_what_the_tokenizer_begins_texts_with(client, llm: LLM):
    (score,) = post(client, "/v1/score", prompt="", answers=[words(7)])["scores"]
    assert score["log_likelihood"] == pytest.approx(llm.score([BOS], [7]), rel=1e-5)


def test_an_empty_prompt_begins_a_text(client, llm: LLM):
    (expected,) = llm.generate(prompt_token_ids=[[BOS]], sampling=SamplingParams(max_tokens=3))
    (empty,) = llm.generate(prompt_token_ids=[[]], sampling=SamplingParams(max_tokens=3))
    assert (empty.token_ids, empty.prompt_token_ids) == (expected.token_ids, [BOS])
    for prompt in ("", [[]]):
        answer = post(client, "/v1/completions", prompt=prompt, max_tokens=3)
        assert answer["choices"][0]["token_ids"] == expected.token_ids
        assert answer["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"mc_num": 4}, "mc_num"),
        ({"batch_size": 4}, "batch_size"),
        ({"cfg_scale": 1.0}, "cfg_scale"),
        ({"seed": 4}, "seed"),
    ],
)
def test_how_an_estimate_is_made_is_refused(client, extra: dict, param: str):
    answer = client.post("/v1/score", json={"prompt": "w1", "answers": ["w2"], **extra})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.slow
def test_echo_with_log_probabilities_scores_the_prompts(client, llm: LLM):
    body = {"prompt": [PROMPT, OTHER], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    found = post(client, "/v1/completions", **body)
    [scores] = llm.token_logprobs([(PROMPT[:1], PROMPT[1:])])
    sampling = SamplingParams(max_tokens=1, logprobs=True)
    generated = llm.generate(prompt_token_ids=[PROMPT, OTHER], sampling=sampling)
    for ids, output, choice in zip((PROMPT, OTHER), generated, found["choices"], strict=True):
        told = choice["logprobs"]
        assert told["kind"] == "log_likelihood"
        assert choice["text"] == words(*ids, *output.token_ids)
        assert told["tokens"] == [f" {words(token)}" for token in (*ids, *output.token_ids)]
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][len(ids) :] == pytest.approx(output.logprobs, rel=1e-4)
    told = found["choices"][0]["logprobs"]
    assert told["token_logprobs"][1:-1] == pytest.approx([one.logprob for one in scores], rel=1e-5)
    for token, top, one in zip(told["tokens"][1:], told["top_logprobs"][1:], scores, strict=False):
        assert set(top) == {token, f" {words(one.best)}"}
        assert max(top.values()) == pytest.approx(one.best_logprob, rel=1e-5)
    assert found["usage"]["forward_evaluations"] == 2 + sum(output.nfe for output in generated)


def test_an_echo_alone_is_scored_too(client, llm: LLM):
    body = {"prompt": [PROMPT, [], OTHER], "max_tokens": 0, "logprobs": 1, "echo": True}
    found = post(client, "/v1/completions", **body)
    [scores] = llm.token_logprobs([(PROMPT[:1], PROMPT[1:])])
    told = [choice["logprobs"]["token_logprobs"] for choice in found["choices"]]
    assert told[0] == [None, *(pytest.approx(one.logprob, rel=1e-5) for one in scores)]
    assert told[1:] == [[None], [None]]
    assert found["usage"]["completion_tokens"] == 0


def test_a_choice_is_the_likeliest_option_between_its_texts(client, llm: LLM):
    options = ["w7 w8", "w9", "w10"]
    parts = [words(*PROMPT), {"type": "choice", "options": options}, "w11 w12"]
    (choice,) = post(client, "/v1/infill", parts=parts)["choices"]
    expected = llm.choose([BOS, *PROMPT], [[7, 8], [9], [10]], [11, 12])
    (slot,) = choice["slots"]
    assert [option["logprob"] for option in slot["options"]] == pytest.approx(expected.logprobs, rel=1e-5)
    assert slot["chosen"] == expected.best
    assert choice["token_ids"] == [BOS, *PROMPT, *([7, 8], [9], [10])[expected.best], 11, 12]
    streamed = client.post("/v1/infill", json={"parts": parts, "stream": True})
    assert events(streamed.text)[-1][1]["slots"] == choice["slots"]


def test_a_choice_that_begins_a_text(client, llm: LLM):
    parts = [{"type": "choice", "options": ["w7", "w9"]}, "w11"]
    (choice,) = post(client, "/v1/infill", parts=parts)["choices"]
    (slot,) = choice["slots"]
    assert slot["chosen"] == llm.choose([BOS], [[7], [9]], [11]).best
    assert (slot["start"], slot["stop"]) == (1, 2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"parts": ["w1", {"type": "text", "max_tokens": 2}]}, "parts"),
        ({"parts": ["w1", *[{"type": "choice", "options": ["w2"]}] * 2]}, "parts"),
        ({"parts": ["w1"]}, "parts"),
        ({"text": "w1"}, "text"),
        ({"token_ids": [5]}, "token_ids"),
    ],
)
def test_nothing_else_is_filled(client, body: dict, param: str):
    answer = client.post("/v1/infill", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith("a causal model fills no masks, but makes one choice")
