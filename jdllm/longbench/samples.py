"""Files of LongBench and InfiniteBench, a JSON object a line, as samples with prompts in three parts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jdllm.arguments import shortened
from jdllm.errors import RequestError
from jdllm.json_files import numbered_lines, parse_object
from jdllm.longbench.templates import BENCHMARKS, Dataset

_LETTERS = "ABCD"
_EVEN = "_e"
"""Behind the names of LongBench-E, whose samples are asked and scored as LongBench's."""

_EXAMPLES = {
    "longbench": '{"dataset": "hotpotqa", "input": "...", "context": "...", "answers": ["..."]}',
    "infinitebench": '{"input": "...", "context": "...", "answer": ["..."]}',
}


class Sample(NamedTuple):
    """One question over a long context.

    - `instruction`, `context`, `query`: the prompt is these three, one after the other.
    - `answers`: what scores full marks; see the scores of each dataset.
    - `task`: the dataset.
    - `all_classes`: the classes to choose from, for datasets that classify.
    - `length`: words or, in Chinese, characters of the sample, where the file tells it.
    """

    instruction: str
    context: str
    query: str
    answers: tuple[str, ...]
    task: str
    all_classes: tuple[str, ...] = ()
    length: int | None = None


def read_samples(
    paths: Sequence[Path], benchmark: str, dataset: str | None = None, limit: int | None = None
) -> dict[str, list[Sample]]:
    """Read files in the public format of a benchmark.

    Arguments:
    - `paths`: JSON lines, UTF-8; blank lines are passed over. A line's dataset is that of its `dataset`
      field, which LongBench's have; else the one that is asked for, or that the file is named after
      (`passkey.jsonl`). Names of LongBench-E (`qasper_e`) are the names of LongBench.
    - `benchmark`: "longbench" or "infinitebench".
    - `dataset`: read samples of this one only; `None` reads all.
    - `limit`: samples of each dataset at most, the first ones.

    Returns the samples of each dataset, in the order of the files.

    Raises `RequestError`, naming file and line, for a file that cannot be read, a line that is no JSON object
    or lacks a field, a dataset that the benchmark has not, and files without any sample.
    """
    if benchmark not in BENCHMARKS:
        raise RequestError(f"unknown benchmark {benchmark!r}: expected {' or '.join(BENCHMARKS)}")
    if dataset is not None:
        dataset = _known(dataset, benchmark)
    samples: dict[str, list[Sample]] = {}
    for path in paths:
        for sample in _read(path, benchmark, dataset):
            kept = samples.setdefault(sample.task, [])
            if limit is None or len(kept) < limit:
                kept.append(sample)
    where = ", ".join(map(str, paths))
    if not samples:
        raise RequestError(f"{where}: no line in it, expected such as {_EXAMPLES[benchmark]}")
    if dataset is None:
        return samples
    if dataset not in samples:
        raise RequestError(f"{where}: no sample of {dataset}, only of {', '.join(samples)}")
    return {dataset: samples[dataset]}


def _read(path: Path, benchmark: str, asked: str | None) -> Iterator[Sample]:
    """The samples of one file; `asked`: the dataset of lines that name none."""
    for number, line in numbered_lines(path, RequestError):
        where = f"{path}, line {number}"
        entry = parse_object(line, Path(where), RequestError)
        try:
            yield _sample(entry, benchmark, asked or path.stem)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None


def _sample(entry: Mapping[str, Any], benchmark: str, otherwise: str) -> Sample:
    """A sample from a line; `otherwise`: the dataset where the line names none."""
    task = _task(entry, benchmark, otherwise)
    dataset = BENCHMARKS[benchmark][task]
    fields = {"input": _text(entry, "input", may_be_empty=True), **_further_fields(entry, task, dataset)}
    before, _, after = dataset.template.partition("{context}")
    length = entry.get("length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
        raise RequestError(f"length is {shortened(length)}, expected an integer")
    return Sample(
        before.format(**fields),
        _text(entry, "context"),
        after.format(**fields),
        _answers(entry, "answers" if benchmark == "longbench" else "answer", task, dataset),
        task,
        _classes(entry, dataset),
        length,
    )


def _task(entry: Mapping[str, Any], benchmark: str, otherwise: str) -> str:
    named = entry.get("dataset")
    if named is not None:
        return _known(named, benchmark)
    if otherwise.removesuffix(_EVEN) in BENCHMARKS[benchmark]:
        return otherwise.removesuffix(_EVEN)
    first = next(iter(BENCHMARKS[benchmark]))
    raise RequestError(
        f"it has no dataset field: say which dataset it is, as in {benchmark}:{first}, or call the file"
        f" {first}.jsonl"
    )


def _known(name: Any, benchmark: str) -> str:
    known = BENCHMARKS[benchmark]
    if isinstance(name, str) and name.removesuffix(_EVEN) in known:
        return name.removesuffix(_EVEN)
    raise RequestError(f"unknown dataset {shortened(name)}: {benchmark} has {', '.join(known)}")


def _text(entry: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    if key not in entry:
        raise RequestError(f"{key} is missing: expected a text")
    value = entry[key]
    if not isinstance(value, str) or not (value or may_be_empty):
        raise RequestError(f"{key} is {shortened(value)}, expected a text{'' if may_be_empty else ' in it'}")
    return value


def _texts(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts and numbers, or a single one, as texts; a list in a list is that list."""
    if key not in entry:
        raise RequestError(f"{key} is missing: expected a list of texts")
    value = entry[key]
    values = value if isinstance(value, list) else [value]
    if len(values) == 1 and isinstance(values[0], list):
        (values,) = values
    if not values or not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
        raise RequestError(f"{key} is {shortened(value)}, expected a list of texts")
    return tuple(map(str, values))


def _answers(entry: Mapping[str, Any], key: str, task: str, dataset: Dataset) -> tuple[str, ...]:
    answers = _texts(entry, key)
    for answer in answers:
        if not re.search(dataset.answer.pattern, answer):
            raise RequestError(
                f"{key} of {task} is {shortened(answer)}, expected such as {dataset.answer.example!r}"
            )
    if "{OPTION_A}" not in dataset.template:
        return answers
    options = _options(entry)
    if len(answers) == 2 and answers[1] in _LETTERS:
        return answers
    if len(answers) != 1 or answers[0] not in options:
        raise RequestError(f"{key} is {shortened(list(answers))}, expected the text of one of the options")
    return (answers[0], _LETTERS[options.index(answers[0])])


def _options(entry: Mapping[str, Any]) -> tuple[str, ...]:
    options = _texts(entry, "options")
    if len(options) != len(_LETTERS):
        raise RequestError(f"options has {len(options)} texts, expected {len(_LETTERS)}")
    return options


def _classes(entry: Mapping[str, Any], dataset: Dataset) -> tuple[str, ...]:
    return _texts(entry, "all_classes") if dataset.metric == "classification" else ()


def _further_fields(entry: Mapping[str, Any], task: str, dataset: Dataset) -> dict[str, str]:
    """What InfiniteBench's templates hold beside context and input."""
    if "{OPTION_A}" in dataset.template:
        return {f"OPTION_{x}": text for x, text in zip(_LETTERS, _options(entry), strict=True)}
    asked = _text(entry, "input", may_be_empty=True)
    if task == "math_find":
        found = re.search("The (.+) of", asked)
        if found is None:
            raise RequestError(
                'input has no "The ... of": expected such as "The largest number of the list is:"'
            )
        return {"prefix": f"What is the {found[1].lower()} in the following list?"}
    if task == "code_run":
        found = re.search(r"(func_[0-9]+)\(-?[0-9]+\)", asked)
        if found is None:
            raise RequestError('input calls no function: expected a call such as "func_1(7)" in it')
        return {"func": found[1], "func_call": found[0]}
    return {}
