"""`jdllm eval`: scores, counts and times."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from jdllm.cli import app
from jdllm.cli.evaluate import generator
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo.tokenizer import EOS
from jdllm.llm import LLM
from jdllm.outputs import CompletionOutput, RequestOutput
from jdllm.serving.timings import Timings
from tests.cli.helpers import LLADA, UseModel, assert_mistake
from tests.helpers import Golden


class Calculator:
    """Stands in for a model: adds and subtracts, with two forward evaluations a prompt and step."""

    def __init__(self) -> None:
        self.calls: list[SamplingParams] = []

    def default_sampling(self) -> SamplingParams:
        return SamplingParams()

    def generate(self, *, prompt_token_ids: list[list[int]], sampling: SamplingParams) -> list[RequestOutput]:
        self.calls.append(sampling)
        return [self._answer(ids, sampling) for ids in prompt_token_ids]

    def _answer(self, ids: list[int], sampling: SamplingParams) -> RequestOutput:
        a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)=", bytes(ids).decode()).groups()  # pyright: ignore
        answer = [*str(int(a) + int(sign + b)).encode()]
        end = [EOS] * (sampling.gen_length - len(answer))
        assert sampling.steps is not None
        output = CompletionOutput(0, None, answer + end, "stop", 2 * sampling.steps, Timings(0, 0))
        return RequestOutput(None, ids, 0, [output])


def test_eval_scores_answers_and_counts_forwards(use_model: UseModel):
    calculator = Calculator()
    use_model(calculator)
    args = [
        "eval",
        "--task",
        "addition",
        "--instances",
        "50",
        "--steps",
        "4",
        "--block-length",
        "16",
        "--json",
    ]
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stderr) == (0, "")
    (task,) = json.loads(result.stdout)["tasks"]
    assert (task["task"], task["instances"], task["exact_match"]) == ("addition", 50, 1.0)
    assert task["baseline_exact_match"] < 0.5
    assert task["tokens_per_forward"] == 32 / 8
    assert task["seconds"] >= 0
    assert [(call.steps, call.gen_length, call.early_stop) for call in calculator.calls] == [
        (2, 32, False),
        (4, 32, False),
    ]


def test_eval_prints_a_table(use_model: UseModel):
    use_model(Calculator())
    args = ["eval", "--task", "subtraction", "--task", "addition", "--instances", "3", "--steps", "2"]
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == ["task", "subtraction", "addition"]
    assert [row[1:3] for row in rows[1:]] == [["3", "100.0%"], ["3", "100.0%"]]


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        pytest.param({}, 4 * 4, marks=pytest.mark.slow),
        pytest.param({"cache": "sparse", "refresh_delay": 0}, 4 * 4, marks=pytest.mark.slow),
        ({"cache": "dual", "transfer": "threshold", "threshold": 0.05}, None),
    ],
    ids=["none", "sparse", "dual-threshold"],
)
@pytest.mark.slow
def test_the_timed_run_of_an_evaluation_compiles_nothing(
    options: dict[str, Any], forwards: int | None, monkeypatch: pytest.MonkeyPatch
):
    llm = LLM(LLADA, dtype="float32", max_num_batched_tokens=64)
    compiled: list[int] = []
    plain = llm.generate

    def generate_and_count(**kwargs: Any) -> list[RequestOutput]:
        outputs = plain(**kwargs)
        compiled.append(len(llm.executables))
        return outputs

    monkeypatch.setattr(llm, "generate", generate_and_count)
    sampling = SamplingParams(gen_length=16, block_length=8, steps=4, early_stop=False, **options)
    prompts = [[5] * n for n in (3, 40, 9, 170)]
    generation = generator(llm, sampling)(prompts)
    assert compiled[-2] == compiled[-1] > 1
    expected = plain(prompt_token_ids=prompts, sampling=sampling)
    assert generation.outputs == [o.token_ids for o in expected]
    assert generation.committed == 64
    assert generation.forwards == (forwards or sum(o.nfe for o in expected))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--task", "cooking"], ["unknown demo task 'cooking'", "addition"]),
        (["--instances", "0"], ["--instances", "or equal to 1"]),
        (["--instances", "99999999999"], ["--instances", "10000"]),
        (["--steps", "0"], ["steps is 0"]),
        (["--gen-length", "16", "--block-length", "32"], ["not divisible by --block-length 32"]),
        (["--model", "no such directory"], ["no such directory"]),
    ],
)
def test_mistakes_in_an_evaluation(args: list[str], words: list[str]):
    assert_mistake(CliRunner().invoke(app, ["eval", "--model", str(LLADA), *args]), *words)


def test_a_causal_model_is_refused():
    causal = Golden("llama").directory
    result = CliRunner().invoke(app, ["eval", "--model", str(causal)])
    assert_mistake(result, f"--model {causal} is causal", "denoise")
