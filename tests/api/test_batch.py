"""Files of requests: what is read, what is answered, and what a killed run leaves."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.api.app import create_app
from jdllm.api.batch import AnswerFile, EngineDeadError, Task, answer_all, read_requests
from jdllm.api.errors import dead
from jdllm.api.service import Service
from jdllm.errors import RequestError

COMPLETIONS = "/v1/completions"
SHORT = {"max_tokens": 4, "temperature": 0}


def request(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def lines(*entries: Any) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def answered(custom_id: str | None, message: str | None = None) -> dict[str, Any]:
    """A line of answers as a run has written it."""
    error = None if message is None else {"code": "invalid_line", "message": message}
    return {"id": "batch_req-1", "custom_id": custom_id, "response": None, "error": error}


def test_requests_are_answered_as_by_the_server_and_many_at_a_time(service: Service, client: TestClient):
    chat = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
    asked = [
        *(Task(f"{i}", COMPLETIONS, {"prompt": f"{i}+{i}=", **SHORT}) for i in range(4)),
        Task("chat", "/v1/chat/completions", chat),
        Task("response", "/v1/responses", {"input": "1+1=", "max_output_tokens": 4}),
        Task("wrong field", COMPLETIONS, {"prompt": "1+1=", "n": 0}),
        Task("wrong model", COMPLETIONS, {"prompt": "1+1=", "model": "gpt"}),
    ]
    before = service.llm.engine.stats().evaluated
    found: dict[str, Any] = {}
    asyncio.run(answer_all(create_app(service), asked, lambda line: found.update({line["custom_id"]: line})))
    evaluated = service.llm.engine.stats().evaluated - before
    assert evaluated < 6 * 4  # six requests of four steps each
    assert set(found) == {task.custom_id for task in asked}
    assert len({line["id"] for line in found.values()}) == len(asked)
    assert len({line["response"]["request_id"] for line in found.values()}) == len(asked)
    for task in asked:
        line = found[task.custom_id]
        expected = client.post(task.url, json=task.body)
        assert line["error"] is None
        assert line["response"]["status_code"] == expected.status_code
        body = line["response"]["body"]
        for key in ("choices", "error", "usage"):
            assert body.get(key) == expected.json().get(key)
    assert found["wrong field"]["response"]["status_code"] == 400


def test_an_engine_that_cannot_go_on_ends_the_run_without_an_answer():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await dead(RuntimeError("lost")).response()(scope, receive, send)

    with pytest.raises(EngineDeadError, match="the engine cannot go on"):
        asyncio.run(answer_all(app, [Task("a", COMPLETIONS, {})], lambda _: pytest.fail("it is no answer")))


@pytest.mark.parametrize(
    ("line", "custom_id", "words"),
    [
        ("{", None, "is not JSON"),
        ("[" * 100_000, None, "is not JSON"),
        ("[]", None, "no object"),
        (json.dumps({"url": COMPLETIONS, "body": {}}), None, "no custom_id"),
        (json.dumps(request("") | {"custom_id": 5}), None, "no custom_id"),
        (json.dumps(request("a") | {"method": "GET"}), "a", "'GET', expected POST"),
        (json.dumps(request("a", "/v1/embeddings")), "a", "'/v1/embeddings', expected one of"),
        (json.dumps(request("a") | {"url": ["x"]}), "a", "expected one of"),
        (json.dumps(request("a") | {"body": []}), "a", "the body is no object"),
        (json.dumps(request("a", stream=True)), "a", "streams"),
    ],
)
def test_a_wrong_line_says_why_and_others_are_read(line: str, custom_id: str | None, words: str):
    tasks, [wrong] = read_requests(f"{lines(request('b'))}\n{line}\r\n{lines(request('c'))}")
    assert [task.custom_id for task in tasks] == ["b", "c"]
    answer = wrong.answer()
    assert (answer["custom_id"], answer["response"]) == (custom_id, None)
    assert answer["error"]["code"] == "invalid_line"
    assert answer["error"]["message"].startswith("line 3")
    assert words in answer["error"]["message"]


def test_one_custom_id_of_two_lines_is_refused():
    wrong = request("a") | {"method": "GET"}
    with pytest.raises(RequestError, match="lines 2 and 4 have one custom_id, 'a'"):
        read_requests("\n" + lines(request("a"), request("b"), wrong))


@pytest.mark.parametrize("torn", range(0, 60, 7))
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: int):
    path = tmp_path / "out.jsonl"
    whole = lines(answered("a"), answered(None, "line 2 is not JSON"))
    path.write_text(whole + lines(answered("c"))[:torn])
    with AnswerFile(path) as file:
        assert file.known == {"a", "line 2 is not JSON"}
        file.add(answered("d"))
    assert path.read_text() == whole + lines(answered("d"))


@pytest.mark.parametrize(
    "content", ["hello\n", "hello", '{"custom_id": "a", "error": null}\nmore', "{}\n", "5\n"]
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, content: str):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(RequestError, match="is no answer of a batch"):
        AnswerFile(path)
    assert path.read_text() == content
