"""`jdllm generate --jsonl`: a prompt and an output a line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jdllm.cli.jsonl import ANSWERED
from jdllm.cli.options import option_names
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.outputs import CompletionOutput
from tests.cli.helpers import LLADA, SHORT, UseModel, assert_mistake, run


def lines(*entries: dict[str, Any]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


ENTRIES = (
    {"prompt": "w5 w6 w7"},
    {"prompt_token_ids": [8], "gen_length": 4, "temperature": 1.0, "seed": 3},
    {"messages": [{"role": "user", "content": "w5 w6"}], "block_length": 4},
)


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_line_out_for_a_line_in(source: str, loaded_speaking: LLM, use_model: UseModel, tmp_path: Path):
    use_model(loaded_speaking)
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines(*ENTRIES) + "\n")
    given = ["--jsonl", "-" if source == "stdin" else str(file)]
    result = run(*given, *SHORT, stdin=lines(*ENTRIES) if source == "stdin" else "")
    assert (result.exit_code, result.stderr) == (0, "")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    plain = SamplingParams(gen_length=8, early_stop=False)
    drawn = SamplingParams(gen_length=4, early_stop=False, temperature=1.0, seed=3)
    blocks = SamplingParams(gen_length=8, early_stop=False, block_length=4)
    expected = [
        *loaded_speaking.generate("w5 w6 w7", plain),
        *loaded_speaking.generate(prompt_token_ids=[[8]], sampling=drawn),
        *loaded_speaking.chat("w5 w6", blocks),
    ]
    assert [o["token_ids"] for o in found] == [o.token_ids for o in expected]
    assert [o["prompt_token_ids"] for o in found] == [[5, 6, 7], [8], [1, 5, 6, 2]]
    assert [o["seed"] for o in found] == [0, 3, 0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
        ("5", ["an object with one of prompt, prompt_token_ids, messages"]),
        ('{"text": "w5"}', ["an object with one of"]),
        ('{"prompt": "w5", "messages": []}', ["an object with one of"]),
        ('{"prompt": 5}', ["prompt must be a text"]),
        ('{"messages": [], "continue_final_mesage": true}', ["did you mean 'continue_final_message'"]),
        ('{"messages": [], "chat_template_kwargs": 5}', ["chat_template_kwargs is 5"]),
        ('{"prompt_token_ids": "w5"}', ["prompt_token_ids must be a list"]),
        ('{"prompt_token_ids": [512]}', ["token id 512"]),
        ('{"messages": []}', ["message"]),
        ('{"prompt": "w5", "gen_length": 0}', ["gen_length is 0"]),
        ('{"prompt": "w5", "steps": 3, "block_length": 4}', ["steps 3 is not divisible"]),
        ('{"prompt": "w5", "return_history": true}', ["no parameter 'return_history'"]),
        ('{"prompt": "w5", "temprature": 1}', ["no parameter 'temprature'", "did you mean 'temperature'"]),
        ('{"prompt": "w5", "maxTokens": 1}', ["no parameter 'maxTokens'", "did you mean 'max_tokens'"]),
        ('{"prompt": "w5", "message": []}', ["did you mean 'messages'"]),
        ('{"prompt": "w5", "text": "w6"}', ["the answer has a key 'text' of its own"]),
    ],
)
@pytest.mark.parametrize("company", ["alone", "among others"])
def test_mistakes_name_the_line(
    line: str, words: list[str], company: str, loaded_speaking: LLM, use_model: UseModel
):
    use_model(loaded_speaking)
    before, number = ("\n", 2) if company == "alone" else ('{"prompt": "w5"}\n\n{"prompt": "w6"}\n', 4)
    result = run("--jsonl", "-", *SHORT, stdin=f"{before}{line}\n")
    assert_mistake(result, f"error: line {number}: ", *words)


USERS = {"id": "q7", "label": 3, "meta": {"from": ["a", None]}, "topic": "sums", "index": 0}


def test_a_user_s_own_keys_come_back(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    unset = {"messages": None, "temperature": None, "gen_length": None, "cache": None}
    given = lines(USERS | unset | ENTRIES[0], {"prompt_token_ids": [8], "id": 5})
    plain = run("--jsonl", "-", *SHORT, stdin=lines(ENTRIES[0], {"prompt_token_ids": [8]}))
    result = run("--jsonl", "-", *SHORT, stdin=given)
    assert (result.exit_code, result.stderr) == (0, "")
    found, expected = ([json.loads(line) for line in r.stdout.splitlines()] for r in (result, plain))
    assert [{name: o.pop(name) for name in kept} for o, kept in zip(found, (USERS, ["id"]), strict=True)] == [
        USERS,
        {"id": 5},
    ]
    for output in (*found, *expected):
        output.pop("timings")
    assert found == expected


def test_keys_of_answers_are_known():
    fields = {f.name for f in dataclasses.fields(CompletionOutput)} - {"index"}
    assert fields <= {*ANSWERED, *option_names()}


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_byte_order_mark_is_no_part_of_the_text(
    source: str, loaded_speaking: LLM, use_model: UseModel, tmp_path: Path
):
    use_model(loaded_speaking)
    marked = b"\xef\xbb\xbf" + lines(*ENTRIES[:1]).replace("\n", "\r\n").encode()
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(marked)
    result = run("--jsonl", "-" if source == "stdin" else str(file), *SHORT, stdin=marked)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["prompt_token_ids"] == [5, 6, 7]
    file.write_bytes(b"\xef\xbb\xbfw5 w6 w7\r\n")
    result = run("--file", str(file), "--json", *SHORT)
    assert json.loads(result.stdout)["outputs"][0]["prompt_token_ids"] == [5, 6, 7]


def test_mistakes_in_the_source(tmp_path: Path):
    assert_mistake(run("--jsonl", "-"), "--jsonl has no line")
    assert_mistake(run("--jsonl", str(tmp_path / "absent")), "--jsonl", "absent", "No such file")
    assert_mistake(run("--jsonl", "-", "w5"), "--jsonl and an argument")
    assert_mistake(run("--jsonl", "-", "--gen-length", "0", stdin=lines(ENTRIES[1])), "--gen-length is 0")
    message = lines({"messages": [{"role": "user", "content": "w5"}]})
    assert_mistake(run("--jsonl", "-", model=LLADA, stdin=message), "line 1: messages need tokenizer files")
