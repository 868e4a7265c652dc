import numpy as np
import pytest
from fastapi.testclient import TestClient

from jdllm.api.service import Service
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.api.sse import events
from tests.helpers import slow

PROMPT, OTHER = "123+456=", "sort: 3 1 2"
GREEDY = {"max_tokens": 16, "temperature": 0}
FIRST = SamplingParams(max_tokens=16, gen_length=16)


def ask(client: TestClient, **body):
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, **body):
    answer = client.post("/v1/completions", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def test_a_completion_is_what_the_library_generates(client, demo: LLM):
    (expected,) = demo.generate([PROMPT], FIRST)
    answer = ask(client, prompt=PROMPT, model="demo", **GREEDY)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == (expected.text, expected.token_ids)
    assert choice["finish_reason"] == expected.finish_reason
    assert choice["nfe"] == expected.nfe
    assert answer["object"] == "text_completion"
    assert answer["model"] == "demo"
    assert answer["usage"] == {
        "prompt_tokens": len(expected.prompt_token_ids),
        "completion_tokens": len(expected.token_ids),
        "total_tokens": len(expected.prompt_token_ids) + len(expected.token_ids),
        "forward_evaluations": expected.nfe,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.slow
def test_without_ends_an_answer_is_as_long_as_was_asked_for(client, demo: LLM):
    """The model ends its answer to this prompt before; stop strings and ids of the request end it still."""
    reasons = {}
    for name, further in {
        "its own end": {},
        "no ends": {"ignore_eos": True},
        "a stop string": {"ignore_eos": True, "stop": ["9"]},
        "a stop id": {"ignore_eos": True, "stop_token_ids": list(demo.config.stop_ids)},
    }.items():
        whole = ask(client, prompt=PROMPT, **GREEDY | further)
        reasons[name] = whole["choices"][0]["finish_reason"]
    assert reasons == dict(zip(reasons, ["stop", "length", "stop", "stop"], strict=True))
    parts = stream(client, prompt=PROMPT, ignore_eos=True, **GREEDY)
    assert parts[-1][1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("form", ["ids", slow("texts"), slow("lists of ids")])
def test_every_form_of_prompt(client, demo: LLM, form, tokenizer: Tokenizer):
    ids = [tokenizer.encode(text) for text in (PROMPT, OTHER)]
    prompts = {"texts": [PROMPT, OTHER], "ids": ids[0], "lists of ids": ids}[form]
    expected = demo.generate([PROMPT, OTHER][: 1 if form == "ids" else 2], FIRST)
    answer = ask(client, prompt=prompts, **GREEDY)
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in expected]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))


@pytest.mark.parametrize("empty", [["", PROMPT], slow(""), slow([[]]), slow([[], [5]])])
def test_an_empty_prompt_asks_for_any_text(client, demo: LLM, empty):
    (expected,) = demo.generate("", FIRST)
    answer = ask(client, prompt=empty, **GREEDY)
    assert answer["choices"][0]["token_ids"] == expected.token_ids
    assert expected.prompt_token_ids == []


def test_samples_follow_the_prompts_in_order(client, demo: LLM):
    sampling = SamplingParams(max_tokens=16, gen_length=16, n=2, temperature=1.5, seed=7)
    expected = demo.generate([PROMPT, OTHER], sampling)
    answer = ask(client, prompt=[PROMPT, OTHER], max_tokens=16, n=2, temperature=1.5, seed=7)
    texts = [sample.text for output in expected for sample in output.outputs]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["seeds"] == [7, 7]


def test_without_a_seed_one_is_drawn_and_told(client):
    first, second = (ask(client, prompt=PROMPT, max_tokens=4, temperature=1)["seeds"] for _ in range(2))
    assert first != second


@pytest.mark.slow
def test_sampling_parameters_have_their_own_names(client, demo: LLM):
    own = {"cache": "dual", "block_length": 8, "transfer": "threshold", "threshold": 0.7}
    (expected,) = demo.generate([PROMPT], SamplingParams(max_tokens=16, gen_length=16, **own))
    (choice,) = ask(client, prompt=PROMPT, **GREEDY, **own)["choices"]
    assert (choice["text"], choice["nfe"]) == (expected.text, expected.nfe)


def test_max_tokens_are_rounded_up_to_blocks_and_the_answer_is_cut(client):
    answer = ask(client, prompt=PROMPT, max_tokens=5, block_length=4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["forward_evaluations"] == 8


def test_ignore_eos_generates_all(client):
    answer = ask(client, prompt=PROMPT, max_tokens=24, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 24


def test_a_suffix_is_infilled_between(client, demo: LLM, tokenizer: Tokenizer, mask_id: int):
    prompt, suffix = (tokenizer.encode(text) for text in ("12+", "=46"))
    masks = [mask_id] * 2
    (expected,) = demo.infill(token_ids=[[*prompt, *masks, *suffix]])
    answer = ask(client, prompt="12+", suffix="=46", max_tokens=2)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.token_ids[len(prompt) : len(prompt) + 2]
    assert choice["text"] == tokenizer.decode(choice["token_ids"])


def test_an_echo_precedes_the_answer(client):
    plain = ask(client, prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    assert ask(client, prompt=PROMPT, echo=True, **GREEDY)["choices"][0]["text"] == PROMPT + plain


def test_log_probabilities_are_those_of_the_committing_step(client, demo: LLM):
    (expected,) = demo.generate([PROMPT], SamplingParams(max_tokens=16, gen_length=16, logprobs=True))
    found = ask(client, prompt=PROMPT, logprobs=1, **GREEDY)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(expected.logprobs)
    assert found["committed_in"] == expected.committed_in
    assert found["text_offset"][1] == len(found["tokens"][0])


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, slow(0), slow(1)])
def test_the_likeliest_tokens_are_listed_beside_the_chosen_one(client, demo: LLM, count: int):
    """At a temperature the chosen one is often none of them."""
    drawn = {"temperature": 2.5, "seed": 3}
    sampling = SamplingParams(max_tokens=16, gen_length=16, logprobs=count, **drawn)
    (expected,) = demo.generate([PROMPT], sampling)
    body = {"prompt": PROMPT, "max_tokens": 16, "gen_length": 16, "logprobs": count} | drawn
    found = ask(client, **body)["choices"][0]["logprobs"]
    own = zip(expected.token_ids, expected.logprobs or [], strict=True)
    tops = expected.top_logprobs or [{token: logprob or 0.0} for token, logprob in own]
    for listed, token, likeliest in zip(found["top_logprobs"], found["tokens"], tops, strict=True):
        assert likeliest is not None
        assert sorted(listed.values()) == pytest.approx(sorted(likeliest.values()))
        assert token in listed
        assert count <= len(listed) <= count + 1
    parts = [data["choices"][0]["logprobs"]["top_logprobs"] for _, data in stream(client, **body)]
    assert [listed for part in parts for listed in part] == found["top_logprobs"]


@pytest.mark.slow
def test_echo_with_log_probabilities_masks_each_token_alone(
    client, demo: LLM, tokenizer: Tokenizer, mask_id: int
):
    ids = tokenizer.encode(PROMPT)
    (choice,) = ask(client, prompt=[ids], max_tokens=1, logprobs=4, echo=True, temperature=0)["choices"]
    found = choice["logprobs"]
    assert found["kind"] == "pseudo_log_likelihood"
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(ids) + 1
    for place, token in enumerate(ids):
        masked = [*ids[:place], mask_id, *ids[place + 1 :]]
        logits = demo.logits([masked])[0, place].astype(np.float64)
        logprobs = logits - np.logaddexp.reduce(logits)
        assert found["token_logprobs"][place] == pytest.approx(logprobs[token], abs=1e-3)
        listed = sorted(found["top_logprobs"][place].values(), reverse=True)
        assert listed[:4] == pytest.approx(np.sort(logprobs)[::-1][:4], abs=1e-3)
        assert len(listed) == 4 + (token not in np.argsort(-logprobs)[:4])


def test_an_echo_alone_generates_nothing(client):
    scored = ask(client, prompt=[PROMPT, ""], max_tokens=1, logprobs=1, echo=True, temperature=0)
    alone = ask(client, prompt=[PROMPT, ""], max_tokens=0, logprobs=1, echo=True, temperature=0)
    assert [choice["text"] for choice in alone["choices"]] == [PROMPT, ""]
    for choice, further in zip(alone["choices"], scored["choices"], strict=True):
        count = len(choice["logprobs"]["tokens"])
        assert choice["logprobs"]["tokens"] == further["logprobs"]["tokens"][:count]
        assert len(further["logprobs"]["tokens"]) == count + 1
        assert choice["logprobs"]["token_logprobs"] == further["logprobs"]["token_logprobs"][:count]
        assert choice["finish_reason"] == "length"
    read = scored["usage"]["prompt_tokens"]
    assert (alone["usage"]["prompt_tokens"], alone["usage"]["completion_tokens"]) == (read, 0)
    assert alone["usage"]["forward_evaluations"] == read
    plain = ask(client, prompt=PROMPT, max_tokens=0, echo=True)
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == (PROMPT, None)
    assert plain["usage"]["forward_evaluations"] == 0


def test_tokens_of_an_echo_have_places_in_the_text_that_was_given(client):
    """A character of several bytes, and a special token that is text, come back as they were."""
    prompt = "1€<|eot_id|>+"
    (choice,) = ask(client, prompt=prompt, max_tokens=1, logprobs=1, echo=True, temperature=0)["choices"]
    assert choice["text"].startswith(prompt)
    expected = [at for at, character in enumerate(prompt) for _ in character.encode()]
    assert choice["logprobs"]["text_offset"] == [*expected, len(prompt)]
    assert choice["logprobs"]["tokens"][:5] == ["1", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "<"]


@pytest.mark.parametrize("cache", ["none", pytest.param("dual", marks=pytest.mark.slow)])
def test_a_stream_is_the_text_in_parts(client, cache):
    body = {"prompt": [PROMPT, OTHER], "max_tokens": 16, "block_length": 4, "cache": cache, "n": 2, "seed": 3}
    whole = ask(client, **body)
    told = stream(client, **body)
    for choice in whole["choices"]:
        mine = [data["choices"][0] for _, data in told if data["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    assert len({data["id"] for _, data in told}) == 1


def test_a_stream_ends_with_its_usage(client):
    body = {"prompt": PROMPT, "max_tokens": 8, "block_length": 4}
    whole = ask(client, **body)
    *parts, last = stream(client, **body, stream_options={"include_usage": True})
    assert last[1]["choices"] == []
    assert last[1]["usage"] == whole["usage"]
    assert all(data["usage"] is None for _, data in parts)
    parts = stream(client, **body, stream_options={"continuous_usage_stats": True})
    counts = [data["usage"]["completion_tokens"] for _, data in parts]
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"]


def test_a_stream_tells_log_probabilities(client):
    body = {"prompt": PROMPT, "max_tokens": 8, "block_length": 4, "logprobs": 1}
    whole = ask(client, **body)["choices"][0]["logprobs"]
    parts = [data["choices"][0]["logprobs"] for _, data in stream(client, **body)]
    for column in ("tokens", "token_logprobs", "committed_in", "text_offset"):
        assert [value for part in parts for value in part[column]] == whole[column]


def test_steps_are_told_as_they_are_done(client):
    body = {"prompt": PROMPT, "max_tokens": 8, "block_length": 4, "seed": 5}
    whole = ask(client, **body)["choices"][0]
    (_, start), *steps, (name, end) = stream(client, **body, stream_mode="denoise")
    assert name == "end"
    assert (end["text"], end["token_ids"], end["nfe"]) == (whole["text"], whole["token_ids"], whole["nfe"])
    assert start["seed"] == 5
    tokens = [None] * start["length"]
    for name, step in steps:
        assert name == "step"
        assert all(0 <= confidence <= 1 for confidence in step["confidence"])
        for place, token, committed in zip(
            step["positions"], step["token_ids"], step["committed"], strict=True
        ):
            assert start["texts"][place] is None
            if committed:
                assert tokens[place] is None
                tokens[place] = token
                assert end["committed_in"][place - start["start"]] == step["step"]
    assert tokens[start["start"] : start["start"] + len(end["token_ids"])] == end["token_ids"]


WRONG = {
    "misspelt field": ({"max_tokns": 1}, "max_tokns"),
    "wrong type": ({"max_tokens": "5"}, "max_tokens"),
    "out of bounds": ({"temperature": -1}, "temperature"),
    "penalty": ({"presence_penalty": 0.5}, "presence_penalty"),
    "format": ({"response_format": {"type": "xml"}}, "response_format"),
    "best_of": ({"best_of": 3}, "best_of"),
    "without effect": ({"threshold": 0.5}, "threshold"),
    "too many steps": ({"steps": 4096}, "steps"),
    "echo streamed": ({"echo": True, "stream": True}, "echo"),
    "echo of likelihoods": ({"echo": True, "logprobs": 1}, "logprobs"),
    "no length": ({"max_tokens": 0}, "max_tokens"),
    "no length between": ({"max_tokens": 0, "echo": True, "suffix": "x"}, "max_tokens"),
    "more log-probabilities": ({"logprobs": 21}, "logprobs"),
    "id outside": ({"prompt": [5000]}, None),
    "no prompt": ({"prompt": []}, "prompt"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_names_its_field(client, case):
    extra, param = WRONG[case]
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8} | extra)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_neutral_fields_are_accepted(client):
    neutral = {
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "best_of": 1,
        "seed": None,
        "stop": None,
        "suffix": None,
    }
    assert ask(client, prompt=PROMPT, max_tokens=4, **neutral)["choices"]


def test_a_context_that_is_too_long_names_the_longest(client, service):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "gen_length": 2**24})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert str(service.longest) in answer.json()["error"]["message"]


def test_another_model_is_not_found(client):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "model": "gpt"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert ask(client, prompt=PROMPT, model="also", max_tokens=2)["model"] == "also"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1}',
        b"[" * 100_000,
        b"NaN",
    ],
)
def test_a_body_that_is_none_is_refused(client, body):
    answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_special_tokens_in_a_text_are_text(client, tokenizer: Tokenizer, mask_id: int):
    mask = tokenizer.token(mask_id)
    assert ask(client, prompt=f"{mask} 1+1=", max_tokens=4)["choices"]
    refused = client.post("/v1/completions", json={"prompt": f"{mask} 1+1=", "parse_special": True})
    assert refused.status_code == 400


def test_more_than_the_queue_ever_holds_is_refused(client):
    answer = client.post("/v1/completions", json={"prompt": [PROMPT] * 65, "max_tokens": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"


def test_a_full_queue_is_told_to_come_back(client, service: Service, monkeypatch: pytest.MonkeyPatch):
    engine = service.llm.engine
    stats = engine.stats()._replace(waiting=60)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    answer = client.post("/v1/completions", json={"prompt": [PROMPT] * 5, "max_tokens": 4})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
