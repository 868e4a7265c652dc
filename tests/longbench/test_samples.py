"""Lines in the public formats become prompts in three parts; what is wrong is told with file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from jdllm.errors import RequestError
from jdllm.longbench.samples import Sample, read_samples
from jdllm.longbench.templates import BENCHMARKS
from tests.longbench.lines import CASES, OPTIONS, line, write

ALL = [(benchmark, dataset) for benchmark, datasets in BENCHMARKS.items() for dataset in datasets]


def read_one(path: Path, benchmark: str, *lines: dict[str, Any]) -> Sample:
    [[sample]] = read_samples([write(path, *lines)], benchmark).values()
    return sample


@pytest.mark.parametrize(("benchmark", "dataset"), ALL)
def test_the_parts_make_up_the_published_prompt(benchmark: str, dataset: str, tmp_path: Path):
    context = "a {brace},\u2028 a line\nand }another{"
    sample = read_one(tmp_path / f"{dataset}.jsonl", benchmark, line(benchmark, dataset, context))
    fields = {
        "context": context,
        "input": CASES[benchmark][dataset].fields["input"],
        "prefix": "What is the second largest number in the following list?",
        "func": "func_1",
        "func_call": "func_1(-3)",
        **{f"OPTION_{letter}": option for letter, option in zip("ABCD", OPTIONS, strict=True)},
    }
    prompt = BENCHMARKS[benchmark][dataset].template.format(**fields)
    assert sample.instruction + sample.context + sample.query == prompt
    assert (sample.context, sample.task) == (context, dataset)


def test_a_line_of_longbench(tmp_path: Path):
    asked = line("longbench", "trec", "Question: Where?\nType: City", input="Question: When?\nType:")
    assert read_one(tmp_path / "any.jsonl", "longbench", asked) == Sample(
        "Please determine the type of the question below. Here are some examples of questions.\n\n",
        "Question: Where?\nType: City",
        "\nQuestion: When?\nType:",
        ("City",),
        "trec",
        ("City", "Date"),
        2,
    )


@pytest.mark.parametrize(
    ("dataset", "fields", "answers"),
    [
        ("longbook_choice_eng", {"answer": "seek"}, ("seek", "C")),
        ("longbook_choice_eng", {"answer": ["seek"]}, ("seek", "C")),
        ("code_debug", {"answer": ["turn", "D"]}, ("turn", "D")),
        ("passkey", {"answer": 71432}, ("71432",)),
        ("math_find", {"answer": [12.5]}, ("12.5",)),
        ("math_find", {"answer": "42"}, ("42",)),
        ("math_calc", {"answer": [8, -5]}, ("8", "-5")),
        ("math_calc", {"answer": [[8, -5]]}, ("8", "-5")),
    ],
)
def test_answers_of_infinitebench(dataset: str, fields: Any, answers: tuple[str, ...], tmp_path: Path):
    asked = line("infinitebench", dataset, **fields)
    sample = read_one(tmp_path / f"{dataset}.jsonl", "infinitebench", asked)
    assert (sample.answers, sample.length) == (answers, None)


def test_the_field_names_the_dataset_and_the_file_otherwise(tmp_path: Path):
    qasper, hotpotqa = (line("longbench", name) for name in ("qasper", "hotpotqa"))
    unnamed = {key: value for key, value in hotpotqa.items() if key != "dataset"}
    path = write(tmp_path / "musique_e.jsonl", qasper, unnamed, hotpotqa, {**qasper, "dataset": "qasper_e"})
    groups = read_samples([path], "longbench")
    assert {name: len(group) for name, group in groups.items()} == {"qasper": 2, "musique": 1, "hotpotqa": 1}
    asked = read_samples([path], "longbench", "2wikimqa")
    assert [sample.task for sample in asked["2wikimqa"]] == ["2wikimqa"]


def test_blank_lines_and_windows_line_ends_are_passed_over(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    text = json.dumps(line("longbench", "qasper"))
    path.write_bytes(f"\ufeff\n{text}\r\n  \r\n{text}".encode())
    assert len(read_samples([path], "longbench")["qasper"]) == 2


def test_the_limit_is_for_each_dataset_over_all_files(tmp_path: Path):
    first = write(tmp_path / "a", *[line("longbench", "qasper", f"{i}") for i in range(3)])
    second = write(tmp_path / "b", *[line("longbench", name, "9") for name in ("qasper", "musique")])
    groups = read_samples([first, second], "longbench", limit=2)
    assert {name: [s.context for s in group] for name, group in groups.items()} == {
        "qasper": ["0", "1"],
        "musique": ["9"],
    }


@pytest.mark.parametrize(
    ("benchmark", "dataset", "fields", "words"),
    [
        ("longbench", "qasper", {"dataset": "cooking"}, ["unknown dataset 'cooking'", "narrativeqa"]),
        ("longbench", "qasper", {"dataset": 7}, ["unknown dataset 7"]),
        ("longbench", "qasper", {"dataset": None}, ["no dataset field", "longbench:narrativeqa"]),
        ("longbench", "qasper", {"context": ...}, ["context is missing"]),
        ("longbench", "qasper", {"context": ""}, ["context is ''", "expected a text in it"]),
        ("longbench", "qasper", {"context": ["a"]}, ["context is ['a']"]),
        ("longbench", "qasper", {"input": ...}, ["input is missing"]),
        ("longbench", "qasper", {"input": None}, ["input is None"]),
        ("longbench", "qasper", {"answers": ...}, ["answers is missing", "a list of texts"]),
        ("longbench", "qasper", {"answers": []}, ["answers is []"]),
        ("longbench", "qasper", {"answers": [True]}, ["answers is [True]"]),
        ("longbench", "qasper", {"length": "long"}, ["length is 'long'", "an integer"]),
        ("longbench", "trec", {"all_classes": None}, ["all_classes is None"]),
        ("longbench", "lsht", {"all_classes": ...}, ["all_classes is missing"]),
        ("longbench", "passage_retrieval_en", {"answers": ["7"]}, ["'7'", "'Paragraph 1'"]),
        ("infinitebench", "passkey", {"answer": ...}, ["answer is missing"]),
        ("infinitebench", "passkey", {"answer": "abc"}, ["answer of passkey is 'abc'", "'42'"]),
        ("infinitebench", "code_debug", {"options": ["a"]}, ["options has 1 texts, expected 4"]),
        ("infinitebench", "code_debug", {"options": ...}, ["options is missing"]),
        ("infinitebench", "code_debug", {"answer": "other"}, ["answer is ['other']", "one of the options"]),
        ("infinitebench", "math_find", {"input": "Which?"}, ['"The ... of"']),
        ("infinitebench", "code_run", {"input": "Which?"}, ['"func_1(7)"']),
    ],
)
def test_mistakes_in_a_line(
    benchmark: str, dataset: str, fields: dict[str, Any], words: list[str], tmp_path: Path
):
    wrong = {k: v for k, v in line(benchmark, dataset, **fields).items() if v is not ...}
    named = {} if benchmark == "longbench" else {"dataset": dataset}
    path = write(tmp_path / "data.jsonl", line(benchmark, dataset) | named, named | wrong)
    with pytest.raises(RequestError) as mistake:
        read_samples([path], benchmark)
    message = str(mistake.value)
    assert message.startswith(f"{path}, line 2: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["no line in it", '"answers"']),
        (b"\n \n", ["no line in it"]),
        (b"{}\n", ["line 1: it has no dataset field"]),
        (b"\n{", ["line 2 is not readable as JSON"]),
        (b"[1]", ["line 1 holds a list", "a JSON object"]),
        (b'{"a": 1, "a": 2}', ["line 1", "the key 'a' twice"]),
        (b"\xff", ["no UTF-8 text"]),
        (None, ["cannot be read: No such file"]),
    ],
)
def test_mistakes_in_a_file(content: bytes | None, words: list[str], tmp_path: Path):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError) as mistake:
        read_samples([path], "longbench")
    for word in [str(path), *words]:
        assert word in str(mistake.value)


def test_mistakes_in_what_is_asked_for(tmp_path: Path):
    path = write(tmp_path / "data.jsonl", line("longbench", "qasper"), line("longbench", "musique"))
    with pytest.raises(RequestError, match="no sample of hotpotqa, only of qasper, musique"):
        read_samples([path], "longbench", "hotpotqa")
    with pytest.raises(RequestError, match="unknown dataset 'passkey': longbench has narrativeqa, "):
        read_samples([path], "longbench", "passkey")
    with pytest.raises(RequestError, match="'shortbench': expected longbench or infinitebench"):
        read_samples([path], "shortbench")
