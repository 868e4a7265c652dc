"""Options are sampling parameters, all of them, in both commands."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

from jdllm.cli import app
from jdllm.cli.evaluate import evaluate
from jdllm.cli.generate import generate
from jdllm.decoding.sampling import SamplingParams
from jdllm.outputs import RequestOutput
from tests.cli.helpers import IDS, UseModel

FOR_PYTHON = ("return_history", "max_tokens", "n", "stop", "stop_token_ids", "logprobs", "min_p")


def test_every_sampling_parameter_is_an_option():
    parameters = inspect.signature(generate).parameters
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for name in FOR_PYTHON:
        del fields[name]
    assert {name: parameters[name].default for name in fields} == fields


def literals(annotation: Any) -> Iterator[Any]:
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            yield part


def test_help_names_every_choice():
    parameters = inspect.signature(generate).parameters
    choices = {
        name: get_args(choice)
        for name, kind in get_type_hints(SamplingParams).items()
        for choice in literals(kind)
    }
    assert "transfer" in choices
    shown = {name: parameters[name].annotation.__metadata__[0].metavar for name in choices}
    assert shown == {name: "|".join(values) for name, values in choices.items()}


class Listener:
    """Stands in for a model: keeps what it is asked for and has nothing to say."""

    tokenizer = None

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []

    def generate(self, *_: Any, sampling: SamplingParams, **__: Any) -> list[RequestOutput]:
        self.asked.append(sampling)
        return []


LLADA_OPTIONS = {
    "gen_length": 24,
    "steps": 6,
    "block_length": 8,
    "temperature": 0.5,
    "cfg_scale": 1.5,
    "remasking": "random",
    "undefined_tokens": "official",
    "seed": 2**63,
}
DREAM_OPTIONS = {
    "gen_length": 24,
    "alg": "topk_margin",
    "alg_temp": 0.25,
    "eps": 0.01,
    "top_p": 0.5,
    "top_k": 7,
    "quota": "batch",
}
CACHE_OPTIONS = {
    "gen_length": 24,
    "block_length": 8,
    "cache": "head_sparse",
    "retention": 0.25,
    "pool_kernel": 5,
    "refresh_delay": 2,
    "refresh_interval": 4,
    "official_forcing": True,
}
RULE_OPTIONS = {
    "threshold": {"transfer": "threshold", "threshold": 0.75, "threshold_strict": True},
    "factor": {"transfer": "factor", "factor": 1.25, "factor_end": "fixed"},
    "entropy bound": {"transfer": "entropy_bound", "entropy_bound": 0.5},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "llada": LLADA_OPTIONS,
    "dream": DREAM_OPTIONS,
    "cache": CACHE_OPTIONS,
} | {name: {"gen_length": 24, **options} for name, options in RULE_OPTIONS.items()}


def as_arguments(options: dict[str, Any]) -> list[str]:
    """`{"top_k": 7, "threshold_strict": True}` as `--top-k 7 --threshold-strict`."""
    given = [[f"--{name.replace('_', '-')}", str(value)] for name, value in options.items()]
    return [part for pair in given for part in (pair[:1] if pair[1] == "True" else pair)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("command", ["generate", "eval"])
def test_options_become_sampling_parameters(command: str, options: dict[str, Any], use_model: UseModel):
    defaults = dataclasses.asdict(SamplingParams())
    assert all(defaults[name] != value for name, value in options.items())
    listener = Listener()
    use_model(listener)
    where = IDS if command == "generate" else ["--task", "addition", "--instances", "1"]
    CliRunner().invoke(app, [command, *where, *as_arguments(options)])
    assert listener.asked[-1] == SamplingParams(**options, early_stop=command == "generate")


def test_the_options_of_both_commands_are_all_tried():
    tried = {name for options in OPTIONS.values() for name in options}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields & inspect.signature(evaluate).parameters.keys() == tried
