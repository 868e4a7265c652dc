"""`jdllm eval` on files of LongBench and InfiniteBench."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jdllm.cli import app
from jdllm.decoding.sampling import SamplingParams
from jdllm.outputs import CompletionOutput, RequestOutput
from jdllm.serving.request import Timings
from tests.cli.helpers import LLADA, UseModel, assert_mistake
from tests.longbench.lines import line, write


class Reader:
    """Stands in for a model: answers with the last word of the second line of its prompt."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], SamplingParams]] = []

    def generate(
        self, prompts: list[str], sampling: SamplingParams, *, progress: bool
    ) -> list[RequestOutput]:
        assert progress
        self.calls.append((prompts, sampling))
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: str) -> RequestOutput:
        word = prompt.split("\n")[2].split()[-1]
        return RequestOutput(prompt, [1], 0, [CompletionOutput(0, word, [1], "stop", 1, Timings(0, 0))])


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Four lines of two datasets, of which the reader answers three."""
    lines = [
        line("longbench", "multifieldqa_en", "a red fox", length=10),
        line("longbench", "multifieldqa_en", "a wolf", length=9000),
        line("longbench", "trec", "it is a City", input="Type:"),
        line("longbench", "multifieldqa_en", "one more fox", length=20),
    ]
    return write(tmp_path / "questions.jsonl", *lines)


def run(*args: str, model: Path | None = LLADA) -> Any:
    where = [] if model is None else ["--model", str(model)]
    return CliRunner().invoke(app, ["eval", *where, *args])


def test_a_dataset_at_a_time_is_asked_with_its_own_length(questions: Path, use_model: UseModel):
    reader = Reader()
    use_model(reader)
    result = run("--task", "longbench", "--data", str(questions), "--block-length", "48", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    figures = json.loads(result.stdout)
    assert (figures["benchmark"], figures["average"]) == ("longbench", 83.34)
    qa, trec = figures["datasets"]
    assert (qa["dataset"], qa["metric"], qa["samples"], qa["score"]) == ("multifieldqa_en", "qa_f1", 3, 66.67)
    assert qa["by_length"] == {"0-4k": 100.0, "4-8k": None, "8k+": 0.0}
    assert (trec["dataset"], trec["metric"], trec["samples"], trec["score"]) == (
        "trec",
        "classification",
        1,
        100,
    )
    assert all(dataset["seconds"] >= 0 for dataset in figures["datasets"])
    (asked, sampling), (_, _) = reader.calls
    assert [prompt.split("\n")[2] for prompt in asked] == ["a red fox", "a wolf", "one more fox"]
    assert asked[0].startswith("Read the following text and answer briefly.\n\na red fox\n\nNow, answer")
    assert (sampling.max_tokens, sampling.gen_length, sampling.block_length) == (64, 96, 48)


def test_a_length_and_a_dataset_of_ones_own(questions: Path, use_model: UseModel):
    reader = Reader()
    use_model(reader)
    options = ["--gen-length", "32", "--block-length", "32", "--instances", "2"]
    result = run("--task", "longbench:multifieldqa_en", "--data", str(questions), *options)
    assert (result.exit_code, result.stderr) == (0, "")
    header, row = (text.split() for text in result.stdout.splitlines())
    assert header == ["dataset", "metric", "samples", "score", "0-4k", "4-8k", "8k+", "seconds"]
    assert row[:-1] == ["multifieldqa_en", "qa_f1", "2", "50.00", "100.00", "-", "0.00"]
    [(_, sampling)] = reader.calls
    assert (sampling.max_tokens, sampling.gen_length, sampling.block_length) == (None, 32, 32)


def test_files_of_infinitebench_are_named_after_their_datasets(tmp_path: Path, use_model: UseModel):
    use_model(Reader())
    files = [
        write(tmp_path / f"{name}.jsonl", line("infinitebench", name, context))
        for name, context in (("passkey", "key 71432"), ("kv_retrieval", "value ab-12"))
    ]
    data = [argument for file in files for argument in ("--data", str(file))]
    result = run("--task", "infinitebench", *data)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [text.split()[:4] for text in result.stdout.splitlines()]
    assert rows == [
        ["dataset", "metric", "samples", "score"],
        ["passkey", "first_number", "1", "100.00"],
        ["kv_retrieval", "contained_word", "1", "100.00"],
        ["average", "2", "100.00", rows[-1][-1]],
    ]


@pytest.mark.slow
def test_the_bundled_model_answers(tmp_path: Path):
    lines = [line("infinitebench", "passkey", context) for context in ("The key is 71432.", "It is 5.")]
    path = write(tmp_path / "passkey.jsonl", *lines)
    result = run("--task", "infinitebench", "--data", str(path), "--steps", "1", "--json", model=None)
    assert (result.exit_code, result.stderr) == (0, "")
    [dataset] = json.loads(result.stdout)["datasets"]
    assert (dataset["dataset"], dataset["samples"]) == ("passkey", 2)
    assert dataset["score"] in (0, 50, 100)
    assert dataset["seconds"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--task", "longbench"], ["--task longbench needs its samples", "--data FILE"]),
        (["--data", "FILE"], ["--data is for benchmarks", "--task longbench or --task infinitebench"]),
        (["--data", "FILE", "--task", "sorting"], ["--data is for benchmarks"]),
        (
            ["--data", "FILE", "--task", "longbench", "--task", "sorting"],
            ["longbench stands alone", "2 tasks"],
        ),
        (["--data", "FILE", "--task", "longbench:cooking"], ["unknown dataset 'cooking'", "narrativeqa"]),
        (
            ["--data", "FILE", "--task", "longbench:lcc"],
            ["FILE", "no sample of lcc, only of multifieldqa_en"],
        ),
        (["--data", "nowhere", "--task", "longbench"], ["nowhere cannot be read"]),
        (
            ["--data", "FILE", "--task", "infinitebench"],
            ["FILE, line 1", "unknown dataset 'multifieldqa_en'"],
        ),
        (["--data", "FILE", "--task", "longbench", "--steps", "0"], ["steps is 0"]),
    ],
)
def test_mistakes(args: list[str], words: list[str], questions: Path):
    placed = [str(questions) if word == "FILE" else word for word in args]
    told = [word.replace("FILE", str(questions)) if word.startswith("FILE") else word for word in words]
    assert_mistake(run(*placed), *told)
