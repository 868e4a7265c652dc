"""`jdllm generate --context`: a question over a long text."""

from pathlib import Path

import pytest

from jdllm.decoding.prefilling import PRESETS, Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.llm import LLM
from jdllm.prompts import LongPrompt
from tests.cli.helpers import UseModel, assert_mistake, outputs, run

CONTEXT = "".join(f"a{letter}={index:03d};" for index, letter in enumerate("bcdefghijklmnopqrst"))
SHORT = ["--gen-length", "8", "--query", "get ac="]
CUT = '{"chunk_length": 32, "chunks_kept": 2}'


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(checkpoint_path(), dtype="float32", max_num_batched_tokens=256, kv_pool="32MiB")


@pytest.fixture
def context(tmp_path: Path) -> str:
    path = tmp_path / "context.txt"
    path.write_text(CONTEXT)
    return str(path)


@pytest.mark.slow
def test_it_is_what_the_library_generates(demo: LLM, use_model: UseModel, context: str):
    use_model(demo)
    prefilling = Prefilling(chunk_length=32, chunks_kept=2)
    prompt = LongPrompt(instruction="i: ", context=CONTEXT, query="get ac=")
    (expected,) = demo.generate(prompt, SamplingParams(gen_length=8, prefilling=prefilling))
    asked = ["--context", context, *SHORT, "--instruction", "i: ", "--prefilling", CUT]
    (output,) = outputs(run(*asked, "--json"))
    assert output["text"] == expected.text
    assert expected.prefilling is not None
    assert output["prefilling"]["selected"] == expected.prefilling.selected
    assert output["prefilling"]["scores"] == pytest.approx(expected.prefilling.scores)
    assert run(*asked).stdout == f"{expected.text}\n"


@pytest.mark.slow
def test_a_conversation(demo: LLM, use_model: UseModel, context: str):
    use_model(demo)
    prefilling = PRESETS["ultrallada"].changed(chunk_length=64, chunk_bos=False)
    sampling = SamplingParams(gen_length=8, prefilling=prefilling)
    (expected,) = demo.chat("get ac=", sampling, context=CONTEXT)
    named = '{"preset": "ultrallada", "chunk_length": 64, "chunk_bos": false}'
    (output,) = outputs(run("--context", context, *SHORT, "--chat", "--prefilling", named, "--json"))
    assert (output["prompt"], output["text"]) == (expected.prompt, expected.text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--query", "x"], "needs --context FILE too"),
        (["--context", "CONTEXT"], "needs --query TEXT too"),
        (["--context", "CONTEXT", "--query", "x"], "--prefilling dream"),
        (["--context", "CONTEXT", "--query", "x", "y"], "give it once"),
        (["--context", "missing", "--query", "x", "--prefilling", "dream"], "cannot be read"),
        (["--context", "CONTEXT", "--query", "x", "--prefilling", "{"], "is '{', expected"),
        (
            ["--context", "CONTEXT", "--query", "x", "--instruction", "y", "--chat", "--prefilling", "dream"],
            "leave --instruction out",
        ),
    ],
)
def test_mistakes(demo: LLM, use_model: UseModel, context: str, arguments: list[str], words: str):
    use_model(demo)
    result = run(*(context if argument == "CONTEXT" else argument for argument in arguments))
    assert_mistake(result, words)
