import dataclasses
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from fastapi.testclient import TestClient

from jdllm.api.app import Access, create_app
from jdllm.api.service import Service
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.prefilling import PRESETS
from tests.api.undriven import undriven


def test_the_model_is_listed_under_its_names(client, service: Service):
    data = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in data] == ["demo", "also"]
    assert data[0]["max_model_len"] == service.longest <= service.positions
    assert client.get("/v1/models/demo").json() == data[0]
    assert client.get("/models").json()["data"] == data
    assert client.get("/v1/models/other").status_code == 404


@pytest.mark.slow
def test_no_sequence_is_longer_than_the_positions_of_the_model(
    client, service: Service, monkeypatch: pytest.MonkeyPatch
):
    config = dataclasses.replace(service.llm.config, max_positions=64)
    monkeypatch.setattr(service.llm, "config", config)
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 64
    asked = {"prompt": "1+1=" * 12, "max_tokens": 32}
    refused = client.post("/v1/completions", json=asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    message = (
        "longer than the 64 positions of the model; serve --allow-beyond-positions lets longer ones pass"
    )
    assert message in refused.json()["error"]["message"]
    monkeypatch.setattr(
        service, "settings", dataclasses.replace(service.settings, allow_beyond_positions=True)
    )
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == service.room > 64
    assert client.post("/v1/completions", json=asked).status_code == 200


def test_texts_become_ids_and_back(client, tokenizer: Tokenizer):
    text = "1+1=2 é€"
    found = client.post("/tokenize", json={"prompt": text}).json()
    assert found["tokens"] == tokenizer.encode(text)
    assert found["count"] == len(found["tokens"])
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    assert client.post("/tokenize", json={"prompt": "a", "messages": []}).status_code == 400
    known = client.get("/tokenizer_info").json()["model_vocab_size"]
    for tokens in ([known], [0, 2**31 - 1]):
        answer = client.post("/detokenize", json={"tokens": tokens})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tokens"
    assert client.post("/detokenize", json={"tokens": [known - 1]}).status_code == 200
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    end = "<|endoftext|>"
    assert client.post("/tokenize", json={"prompt": end}).json()["tokens"] == [tokenizer.token_id(end)]
    plain = client.post("/tokenize", json={"prompt": end, "parse_special": False}).json()["tokens"]
    assert plain == tokenizer.encode(end)


def test_a_remote_tokenizer_finds_what_it_needs(client, tokenizer: Tokenizer, mask_id: int):
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert info["mask_token_id"] == mask_id
    assert info["chat_template"] == tokenizer.chat_template


def test_a_router_finds_the_name_of_the_model(client):
    listed = client.get("/v1/models").json()["data"]
    assert client.get("/server_info").json() == {"served_model_name": listed[0]["id"]}


def test_health_version_and_counts(client):
    assert client.get("/health").json() == {"status": "ok"}
    head = client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert client.get("/version").json() == {"version": version("jdllm")}
    before = client.get("/v1/stats").json()
    client.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4, "ignore_eos": True})
    after = client.get("/v1/stats").json()
    assert after["finished"] == before["finished"] + 1
    assert after["evaluated"] == before["evaluated"] + 4
    assert after["tokens"] == before["tokens"] + 4
    assert after["rows"]["full"] > before["rows"]["full"]


def test_every_request_is_counted_once_by_its_status(client, service: Service):
    def count(status: int) -> float:
        lines = service.metrics.render().decode().splitlines()
        wanted = f'endpoint="/v1/completions",status="{status}"'
        return sum(float(line.split()[-1]) for line in lines if wanted in line and "_total" in line)

    before = [count(status) for status in (200, 400, 404)]
    bodies = [{"max_tokens": 2}, {"max_token": 1}, {"model": "x"}, {"max_tokens": 2, "stream": True}]
    for body in bodies:
        client.post("/v1/completions", json={"prompt": "1+1="} | body)
    after = [count(status) for status in (200, 400, 404)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1, 1]


def _until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_can_be_cancelled_from_outside(client, service: Service):
    answers = []
    body = {"prompt": "1+1=", "gen_length": 192, "ignore_eos": True, "cache": "dual", "block_length": 32}
    asking = threading.Thread(
        target=lambda: answers.append(client.post("/v1/completions", json=body | {"n": 16}))
    )
    asking.start()
    _until(lambda: client.get("/v1/requests").json()["data"])
    listed = client.get("/v1/requests").json()["data"]
    (call,) = {entry["id"] for entry in listed}
    assert {entry["state"] for entry in listed} <= {"waiting", "running"}
    assert all(entry["length"] == 4 + 192 for entry in listed)
    assert client.delete(f"/v1/requests/{call}").json()["deleted"]
    asking.join()
    assert answers[0].status_code == 409
    assert answers[0].json()["error"]["code"] == "request_cancelled"
    assert answers[0].headers["x-should-retry"] == "false"
    engine = service.llm.engine
    _until(lambda: engine.idle)
    assert engine.stats().free_pages == engine.stats().pages
    assert not client.get("/v1/requests").json()["data"]
    assert client.delete(f"/v1/requests/{call}").status_code == 404


def test_keys_open_the_api_and_nothing_else_needs_one(service: Service):
    with TestClient(create_app(service, Access(api_keys=("right", "spare")))) as client:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            refused = client.get("/v1/models", headers=header)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
            assert "right" not in refused.text
        for key in ("right", "spare"):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert client.get(path).status_code == 200


def test_a_key_that_is_sent_twice_is_one_key(service: Service):
    right, wrong = ("Authorization", "Bearer right"), ("Authorization", "Bearer wrong")
    with TestClient(create_app(service, Access(api_keys=("right", "spare")))) as client:
        for headers, status in (([right, right], 200), ([right, wrong], 401), ([wrong, wrong], 401)):
            assert client.get("/v1/models", headers=headers).status_code == status


class Keys:
    """Asks a server of which nobody drives the engine, so that requests wait until they are ended."""

    def __init__(self, client: TestClient):
        self._client = client
        self._asking: list[threading.Thread] = []

    def ask(self, key: str, method: str, path: str, **options):
        return self._client.request(method, path, headers={"Authorization": f"Bearer {key}"}, **options)

    def post(self, key: str, **body):
        return self.ask(key, "POST", "/v1/completions", json={"prompt": "1+1=", "max_tokens": 1, **body})

    def leave(self, key: str, n: int) -> str:
        """Ask for so many samples; returns the call's id once they wait."""
        before = self.listed(key)
        self._asking.append(threading.Thread(target=self.post, args=(key,), kwargs={"n": n}))
        self._asking[-1].start()
        _until(lambda: len(self.listed(key)) == len(before) + n)
        (call,) = set(self.listed(key)) - set(before)
        return call

    def listed(self, key: str) -> list[str]:
        return [entry["id"] for entry in self.ask(key, "GET", "/v1/requests").json()["data"]]

    def end(self) -> None:
        for call in set(self.listed("admin")):
            assert self.ask("admin", "DELETE", f"/v1/requests/{call}").json()["deleted"]
        for asking in self._asking:
            asking.join()


@pytest.fixture
def keys(service: Service) -> Iterator[Keys]:
    access = Access(api_keys=("one", "other"), admin_key="admin")
    with (
        undriven(service, max_n=4, max_requests_per_key=6) as limited,
        TestClient(create_app(limited, access)) as client,
    ):
        keys = Keys(client)
        yield keys
        keys.end()


def test_who_has_a_key_sees_and_ends_what_came_with_it(keys: Keys):
    call, others = keys.leave("one", 2), keys.leave("other", 1)
    assert keys.listed("one") == [call, call]
    assert keys.listed("other") == [others]
    assert keys.listed("admin") == [call, call, others]
    refused = keys.ask("other", "DELETE", f"/v1/requests/{call}")
    missing = keys.ask("other", "DELETE", "/v1/requests/none")
    assert refused.status_code == missing.status_code == 404
    assert refused.json()["error"]["code"] == missing.json()["error"]["code"]
    assert keys.listed("one") == [call, call]
    assert keys.ask("one", "DELETE", f"/v1/requests/{call}").json()["deleted"]
    _until(lambda: not keys.listed("one"))
    assert keys.listed("admin") == [others]


def test_a_key_has_so_many_requests_at_most(keys: Keys):
    for body in ({"n": 5}, {"n": 4, "prompt": ["1", "2"]}):
        assert (answer := keys.post("one", **body)).status_code == 400
        assert answer.json()["error"]["param"] == "n"
    keys.leave("one", 4)
    refused = keys.post("one", n=3)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert refused.headers["retry-after"]
    keys.leave("one", 2)
    assert keys.post("one").status_code == 429
    keys.leave("other", 3)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("[::1]:8000", 200),
        ("a.example", 400),
        ("localhost.a.example", 400),
        ("localhost:8000.a.example", 400),
        ("", 400),
    ],
)
def test_only_names_of_the_server_are_answered(service: Service, host: str, status: int):
    access = Access(allowed_hosts=("localhost", "[::1]"), cors_origins=("https://a.example",))
    with TestClient(create_app(service, access)) as client:
        for path in ("/health", "/", "/v1/models"):
            answer = client.get(path, headers={"Host": host})
            assert answer.status_code == status
            if status == 400:
                assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/v1/completions/", "//a.example/", "/stats/"])
def test_nobody_is_sent_elsewhere(client, path: str):
    for method in ("GET", "POST"):
        answer = client.request(method, path, headers={"Host": "a.example"}, follow_redirects=False)
        assert "location" not in answer.headers
        assert not answer.is_redirect


def test_bodies_are_bounded(service: Service):
    with TestClient(create_app(service, Access(largest_body=100))) as client:
        answer = client.post("/v1/completions", json={"prompt": "a" * 100})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        chunks = client.post("/v1/completions", content=iter([b" " * 60, b" " * 60]))
        assert chunks.status_code == 413


def test_origins_are_told_to_browsers(service: Service):
    with TestClient(create_app(service, Access(cors_origins=("https://a.example",)))) as client:
        allowed = client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        sent = "authorization,content-type,openai-project,x-stainless-retry-count"
        asked = {
            "Origin": "https://a.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": sent,
        }
        preflight = client.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        admitted = preflight.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
        assert set(sent.split(",")) <= set(admitted)
        other = client.get("/v1/models", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_stats_count_answers_by_status_and_how_long_they_took(client):
    before = client.get("/v1/stats").json()["http"]
    for body in ({"prompt": "1+1=", "max_tokens": 4}, {"prompt": "1+1=", "n": 0}, {"prompt": "1+1=", "n": 0}):
        client.post("/v1/completions", json=body)
    after = client.get("/v1/stats").json()["http"]
    grown = {status: count - before["statuses"].get(status, 0) for status, count in after["statuses"].items()}
    assert {status: count for status, count in grown.items() if count} == {"200": 1, "400": 2}
    assert after["seconds"] > before["seconds"]
    counts = [count for _, count in after["within"]]
    assert counts == sorted(counts)
    assert after["within"][-1] == [None, after["statuses"]["200"]]


def test_the_page_is_told_what_holds_and_what_to_try(service: Service):
    settings = dataclasses.replace(service.settings, examples={"chat": ("1+1=",)})
    told = Service(service.llm, service.engine, settings, service.metrics)
    with TestClient(create_app(told, Access(api_keys=["secret"]))) as client:
        found = client.get("/page/settings.json").json()
    told.close()
    assert found["examples"] == {"chat": ["1+1="]}
    default = service.settings.default_sampling
    assert found["sampling"]["gen_length"] == default.gen_length
    assert (found["sampling"]["cache"], found["sampling"]["top_p"]) == ("none", None)
    assert found["prefilling"]["dream"]["chunk_length"] == PRESETS["dream"].chunk_length
