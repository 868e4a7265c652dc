"""Options are sampling parameters, all of them, in both commands."""

import dataclasses
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.testing import CliRunner

from jdllm.cli import app
from jdllm.cli.evaluate import evaluate
from jdllm.cli.generate import generate
from jdllm.cli.options import in_option_words
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.sampling_options import parameter_kinds
from jdllm.outputs import RequestOutput
from jdllm.structured.structure import Structure
from tests.cli.helpers import IDS, LLADA, UseModel, as_arguments, assert_mistake
from tests.helpers import Golden


def test_every_sampling_parameter_is_an_option():
    parameters = inspect.signature(generate).parameters
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - parameters.keys() == {"return_history"}  # the output of every step is for Python
    assert all(parameters[name].default is None for name in fields & parameters.keys())


def test_every_option_is_explained():
    parameters = inspect.signature(generate).parameters
    for field in dataclasses.fields(SamplingParams):
        if field.name != "return_history":
            assert parameters[field.name].annotation.__metadata__[0].help, field.name


def test_defaults_of_the_documentation_are_those_of_the_fields():
    """What --help says of a default is read off a docstring, which may not differ from the field."""
    parameters = inspect.signature(generate).parameters
    for field in dataclasses.fields(SamplingParams):
        if field.default in (None, (), True, False) or field.name == "cache":
            continue
        text = parameters[field.name].annotation.__metadata__[0].help
        shown = text.rpartition("[default: ")[2].removesuffix("]")
        assert type(field.default)(shown) == field.default, text


def literals(annotation: Any) -> Iterator[Any]:
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            yield part


def test_help_names_every_choice():
    parameters = inspect.signature(generate).parameters
    choices = {
        name: get_args(choice)
        for name, kind in parameter_kinds(SamplingParams).items()
        for choice in literals(kind)
    }
    assert "transfer" in choices
    shown = {name: parameters[name].annotation.__metadata__[0].metavar for name in choices}
    assert shown == {name: "|".join(values) for name, values in choices.items()}


def test_the_librarys_fields_are_named_as_options():
    assert in_option_words("cache 'dual' has no guidance: set cfg_scale=0") == (
        "--cache 'dual' has no guidance: set --cfg-scale 0"
    )
    assert in_option_words("prompt 2: seed is -1, no cache") == "prompt 2: --seed is -1, no cache"
    assert in_option_words("the factor of a seed") == "the factor of a seed"


LLAMA = Golden("llama").directory


class Listener:
    """Stands in for a model: keeps what it is asked for and has nothing to say."""

    tokenizer = None

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []

    def generate(self, *given: Any, sampling: SamplingParams | None = None, **_: Any) -> list[RequestOutput]:
        self.asked.append(sampling or given[1])
        return []


def stating(directory: Path, model: Path, **stated: Any) -> Path:
    """A checkpoint of the configuration of another, without weights, with a generation_config.json."""
    shutil.copy(model / "config.json", directory)
    (directory / "generation_config.json").write_text(json.dumps(stated))
    return directory


def test_options_that_are_not_set_are_the_checkpoints(use_model: UseModel, tmp_path: Path):
    stating(tmp_path, LLADA, gen_length=48, steps=12, temperature=0.5)
    listener = Listener()
    use_model(listener)
    options = ["--model", str(tmp_path), *IDS, "--steps", "none", "--temperature", "0.25"]
    CliRunner().invoke(app, ["generate", *options])
    assert listener.asked == [SamplingParams(gen_length=48, temperature=0.25)]


def test_those_of_a_causal_checkpoint_too(use_model: UseModel, tmp_path: Path):
    stating(tmp_path, LLAMA, do_sample=True, top_p=0.9, repetition_penalty=1.1)
    listener = Listener()
    use_model(listener)
    options = ["--model", str(tmp_path), *IDS, "--repetition-penalty", "1.25"]
    CliRunner().invoke(app, ["generate", *options])
    assert listener.asked == [SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.25)]


def test_controls_of_logits(use_model: UseModel, tmp_path: Path):
    listener = Listener()
    use_model(listener)
    allowed = ["--allowed-token-ids", "5", "--allowed-token-ids", "7"]
    controls = ["--logit-bias", '{"5": -1.5, "7": 2}', *allowed, "--min-tokens", "3", "--bad-words", "5"]
    CliRunner().invoke(app, ["generate", "--model", str(stating(tmp_path, LLADA)), *IDS, *controls])
    assert listener.asked == [
        SamplingParams(logit_bias={5: -1.5, 7: 2.0}, allowed_token_ids=(5, 7), min_tokens=3, bad_words=("5",))
    ]


def test_the_form_of_an_answer(use_model: UseModel, tmp_path: Path):
    listener = Listener()
    use_model(listener)
    typed = ["--structure", '{"json_schema": {"type": "integer"}}']
    CliRunner().invoke(app, ["generate", "--model", str(stating(tmp_path, LLAMA)), *IDS, *typed])
    assert listener.asked == [SamplingParams(structure=Structure(json_schema={"type": "integer"}))]


@pytest.mark.parametrize(
    ("model", "option", "value", "message"),
    [
        (LLAMA, "--structure", "yes", "is 'yes', expected Structure, or its field in a mapping"),
        (LLAMA, "--structure", '{"regex": 5}', "has a wrong field: regex is 5, expected"),
        (LLADA, "--logit-bias", "5", "is '5', expected token ids with numbers from -100 to 100"),
        (LLADA, "--allowed-token-ids", "x", "is 'x', expected an integer from 0 to"),
        (LLADA, "--gen-length", "0", "is 0, expected"),
        (
            LLAMA,
            "--steps",
            "8",
            "is for models that denoise: a causal model generates one token after another",
        ),
        (LLADA, "--repetition-penalty", "1.1", "is for causal models"),
        (
            LLADA,
            "--transfer",
            "adaptive",
            "'adaptive' needs an autoregressive verifier: name one by --verifier",
        ),
    ],
)
def test_a_mistake_in_an_option_is_told_before_anything_is_loaded(
    model: Path, option: str, value: str, message: str, tmp_path: Path
):
    options = ["--model", str(stating(tmp_path, model)), *IDS, option, value]
    result = CliRunner().invoke(app, ["generate", *options])
    assert_mistake(result, f"error: {option} {message}")


@pytest.mark.slow
def test_the_bundled_model_answers_at_the_length_that_it_was_trained_at():
    assert CliRunner().invoke(app, ["generate", "1+1=", "--dtype", "float32"]).stdout == "2\n"


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
    "suffix_window": 64,
}
RULE_OPTIONS = {
    "threshold": {"transfer": "threshold", "threshold": 0.75, "threshold_strict": True},
    "falling threshold": {"transfer": "falling_threshold", "threshold": 0.75, "threshold_fall": 0.6},
    "factor": {"transfer": "factor", "factor": 1.25, "factor_end": "fixed"},
    "entropy bound": {"transfer": "entropy_bound", "entropy_bound": 0.5},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "llada": LLADA_OPTIONS,
    "dream": DREAM_OPTIONS,
    "cache": CACHE_OPTIONS,
} | {name: {"gen_length": 24, **options} for name, options in RULE_OPTIONS.items()}


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


def test_an_evaluation_decides_itself_what_is_returned():
    """Every block is run and one answer scored; all other options are those of a generation."""
    generated = inspect.signature(generate).parameters.keys()
    evaluated = inspect.signature(evaluate).parameters.keys()
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    decided = {"early_stop", "n", "max_tokens", "stop", "stop_token_ids", "logprobs"}
    assert (generated & fields) - evaluated <= decided
    assert not decided & evaluated
    assert fields & evaluated <= generated
