"""Requests whose drafts are verified, over HTTP and on the command line."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from jdllm.cli import app
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.api.sse import events
from tests.api.words_server import served
from tests.causal_texts import words, write_speaking
from tests.cli.helpers import as_arguments, outputs
from tests.conftest import KV_POOL
from tests.helpers import Golden

PROMPT = [5, 17, 300, 44, 120]
ASKED: dict[str, Any] = {
    "max_tokens": 24,
    "block_length": 8,
    "transfer": "lossy_speculation",
    "threshold": 0.5,
    "verify_policy": "span",
    "verify_span": 2,
    "seed": 3,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = write_speaking(tmp_path_factory.mktemp("speaking"), "sdar", "none")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    with LLM(directory, dtype="float32", max_num_batched_tokens=64, kv_pool=KV_POOL, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def token_ids(llm: LLM) -> list[int]:
    [output] = llm.generate(prompt_token_ids=[PROMPT], sampling=SamplingParams(**ASKED, early_stop=False))

    return output.token_ids


def test_requests_over_http(llm: LLM, token_ids: list[int]):
    body, text = {**ASKED, "ignore_eos": True}, words(*token_ids)
    asked = {"prompt": PROMPT, **body}
    chat = {"messages": [{"role": "user", "content": words(*PROMPT)}], **body}
    with served(llm) as client:
        [whole] = client.post("/v1/completions", json=asked).json()["choices"]
        [answer] = client.post("/v1/chat/completions", json=chat).json()["choices"]
        told = events(client.post("/v1/completions", json={**asked, "stream": True}).text)
        refused = client.post("/v1/completions", json={**asked, "temperature": 1.0})
    assert (whole["text"].strip(), answer["message"]["content"].strip()) == (text, text)
    assert "".join(part["choices"][0]["text"] for _, part in told).strip() == text
    assert (refused.status_code, "leave temperature at 0.0" in refused.text) == (400, True)


def test_the_schema_has_the_rule_where_the_model_can_verify(llm: LLM):
    """Other servers leave the rule out: `tests/api/test_schema.py`."""
    with served(llm) as client:
        schema = client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    assert "lossy_speculation" in str(schema["properties"]["transfer"])
    assert schema["properties"]["verify_policy"]["x-used-when"] == {"transfer": ["lossy_speculation"]}


def test_a_stream_of_steps_shows_drafts(llm: LLM, token_ids: list[int]):
    """A step whose draft is verified commits nothing, and tells what it drafted."""
    body = {"prompt": PROMPT, "stream": True, "stream_mode": "denoise", **ASKED, "ignore_eos": True}
    with served(llm) as client:
        told = events(client.post("/v1/completions", json=body).text)
    steps = [part for name, part in told if name == "step"]
    drafts = [part for part in steps if not any(part["committed"])]
    assert drafts
    assert all(part["token_ids"] for part in drafts)
    [end] = [part for name, part in told if name == "end"]
    assert end["token_ids"] == token_ids


def test_the_command_line(llm: LLM, token_ids: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.cli.generate.load_model", lambda *_: llm)
    options = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    given = as_arguments({"token_ids": [PROMPT], "gen_length": ASKED["max_tokens"], **options})
    [output] = outputs(
        CliRunner().invoke(
            app, ["generate", "--model", str(Golden("sdar").directory), *given, "--no-early-stop", "--json"]
        )
    )
    assert output["token_ids"] == token_ids
