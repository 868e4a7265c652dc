"""`jdllm eval --compare`: two models, one after the other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner

from jdllm.cli import app
from jdllm.cli.engine import ModelOptions, load_model
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo.tokenizer import EOS
from jdllm.outputs import CompletionOutput, RequestOutput
from jdllm.serving.timings import Timings
from tests.cli.helpers import LLADA, QWEN2, assert_mistake
from tests.helpers import Golden

ADDITION = ["--task", "addition", "--instances", "20"]
QUICK = ["--steps", "1", "--block-length", "32", "--dtype", "float32", "--max-num-batched-tokens", "512"]
MOE = Golden("llada_moe").directory


class Adder:
    """Stands in for a model: adds, and is wrong by `error` where the sum is odd."""

    def __init__(self, log: list[Any], error: int):
        self._log, self._error = log, error

    def __enter__(self) -> "Adder":
        self._log.append("open")
        return self

    def __exit__(self, *_: object) -> None:
        self._log.append("close")

    def generate(
        self, *, prompt_token_ids: list[list[int]], sampling: SamplingParams, progress: bool
    ) -> list[RequestOutput]:
        self._log.append((prompt_token_ids, sampling))
        return [self._answer(ids, sampling) for ids in prompt_token_ids]

    def _answer(self, ids: list[int], sampling: SamplingParams) -> RequestOutput:
        total = sum(map(int, bytes(ids[:-1]).decode().split("+")))
        answer = [*str(total + self._error * (total % 2)).encode()]
        filled = answer + [EOS] * (sampling.gen_length - len(answer))
        return RequestOutput(None, ids, 0, [CompletionOutput(0, None, filled, "stop", 1, Timings(0, 0))])


@pytest.fixture
def adders(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[ModelOptions]]:
    """Has the command use adders, of which the second errs; what they did, and what was loaded."""
    log: list[Any] = []
    loaded: list[ModelOptions] = []

    def load(source: ModelOptions) -> Adder:
        loaded.append(source)
        return Adder(log, len(loaded) - 1)

    monkeypatch.setattr("jdllm.cli.compare.load_model", load)
    return log, loaded


def compared(*args: str) -> Mapping[str, Any]:
    result = CliRunner().invoke(app, ["eval", *args, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_both_models_get_the_same_requests_and_the_first_is_gone_before_the_second(
    adders: tuple[list[Any], list[ModelOptions]],
):
    found = compared(*ADDITION, "--seed", "7", "--temperature", "0.5", "--compare", "int8")
    log, loaded = adders
    assert [one for one in log if isinstance(one, str)] == ["open", "close", "open", "close"]
    first, second = (one for one in log if not isinstance(one, str))
    assert first == second
    assert (first[1].seed, first[1].temperature, first[1].early_stop) == (7, 0.5, False)
    assert [one.given["quantization"] for one in loaded] == [None, "int8"]
    odd = sum(sum(map(int, bytes(ids[:-1]).decode().split("+"))) % 2 for ids in first[0])
    assert 0 < odd < 20
    (task,) = found["tasks"]
    assert (task["task"], task["exact_match"], task["compared_exact_match"]) == (
        "addition",
        1,
        (20 - odd) / 20,
    )
    assert task["difference"] == -odd / 20
    assert {**task, "task": "all"} == found["all"]


@pytest.mark.parametrize(
    ("args", "models", "forms"),
    [
        (["--compare", str(LLADA)], [None, str(LLADA)], [None, None]),
        (["--quantization", "int8", "--compare", str(LLADA)], [None, str(LLADA)], ["int8", "int8"]),
        (["--quantization", "int8", "--compare", "int4"], [None, None], ["int8", "int4"]),
        (["--model", str(LLADA), "--compare", "int4"], [str(LLADA)] * 2, [None, "int4"]),
    ],
)
def test_what_the_second_model_is(
    args: list[str],
    models: list[str | None],
    forms: list[str | None],
    adders: tuple[list[Any], list[ModelOptions]],
):
    compared(*ADDITION, *args)
    assert [one.model for one in adders[1]] == models
    assert [one.given["quantization"] for one in adders[1]] == forms


def test_a_model_and_itself(monkeypatch: pytest.MonkeyPatch):
    held: list[int] = []

    def load(source: ModelOptions) -> Any:
        held.append(sum(array.nbytes for array in jax.live_arrays()))
        return load_model(source)

    monkeypatch.setattr("jdllm.cli.compare.load_model", load)
    args = ["--task", "addition", "--instances", "2", "--model", str(LLADA), *QUICK]
    found = compared(*args, "--compare", str(LLADA))
    assert (found["all"]["difference"], found["all"]["same_tokens"]) == (0, 1)
    assert found["all"]["instances"] == 2
    assert held[1] - held[0] < (LLADA / "model.safetensors").stat().st_size / 4  # the first model is gone


@pytest.mark.slow
def test_the_table_of_two_forms_of_weights():
    args = ["--task", "addition", "--task", "sorting", "--instances", "3", *QUICK, "--compare", "int4"]
    result = CliRunner().invoke(app, ["eval", *args])
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["addition", "3"], ["sorting", "3"], ["all", "6"]]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--compare", "no such directory"], ["no such directory"]),
        (["--compare", str(QWEN2)], [f"--compare {QWEN2} is causal", "denoise"]),
        (["--model", str(QWEN2), "--compare", "int8"], [f"--model {QWEN2} is causal", "denoise"]),
        (["--devices", "2", "--host-memory", "0", "--compare", "int4"], ["--compare int4", "one device"]),
        (["--task", "cooking", "--compare", "int8"], ["unknown demo task 'cooking'"]),
        (["--task", "longbench", "--data", "x.jsonl", "--compare", "int8"], ["--compare", "longbench"]),
    ],
)
def test_mistakes_in_a_comparison(args: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch):
    def load(_: ModelOptions) -> None:
        raise AssertionError("nothing is loaded")

    monkeypatch.setattr("jdllm.cli.compare.load_model", load)
    assert_mistake(CliRunner().invoke(app, ["eval", *args]), *words)


def test_a_directory_may_have_the_name_of_a_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adders: tuple[list[Any], list[ModelOptions]]
):
    (tmp_path / "int8").symlink_to(LLADA)
    monkeypatch.chdir(tmp_path)
    compared(*ADDITION, "--compare", "./int8")
    assert [one.model for one in adders[1]] == [None, "./int8"]
