"""The declaration of what `LLM` takes, and who takes it: the library, commands, lm-eval and a document."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from jdllm.checkpoints.index import DTYPES as STORED
from jdllm.cli import app
from jdllm.declarations import descriptions
from jdllm.engine_options import DTYPES, KERNELS, KV_CACHE_DTYPES, QUANTIZATIONS, EngineOptions
from jdllm.errors import ConfigError
from jdllm.harness.translation import read_model_arguments
from jdllm.llm import LLM
from jdllm.pallas.device import Kernels
from jdllm.quantised import WeightForm
from jdllm.stored_rows import KvCacheDtype
from tests.cli.helpers import assert_mistake
from tests.helpers import ROOT

FIELDS = {field.name: field for field in dataclasses.fields(EngineOptions)}  # type: ignore[arg-type]
HELPS = descriptions(EngineOptions)
LOADING = ("generate", "infill", "score", "eval", "warmup", "serve", "run-batch")
FOR_PYTHON = {"load_weights", "chunks", "warmup", "progress"}
"""Fields that commands decide, or that only one of them has, in a form of its own."""

OTHERS: dict[str, Any] = {
    "dtype": "float16",
    "hf_overrides": {"eos_token_id": 7},
    "adapter": "adapter",
    "quantization": "int8",
    "load_weights": False,
    "memory": "24GiB",
    "kv_pool": 1 << 30,
    "kv_cache_dtype": "fp8",
    "host_memory": "0",
    "max_num_batched_tokens": 96,
    "max_context": 4096,
    "max_num_logits": np.int64(7),
    "devices": 2,
    "whole_layers": True,
    "verifier": Path("verifier"),
    "verifier_shares_ids": True,
    "plain_drafts": True,
    "kernels": "xla",
    "cache_dir": None,
    "trace": "trace.json",
    "warmup": True,
    "progress": False,
}


def options_of(command: str) -> dict[str, Any]:
    return {option.name: option for option in get_command(app).commands[command].params}  # type: ignore[attr-defined]


def options_with(name: str, value: Any) -> EngineOptions:
    given: dict[str, Any] = {name: value}
    return EngineOptions("model", **given)


def test_the_library_takes_every_field_with_its_default():
    model, *parameters = inspect.signature(LLM).parameters.values()
    assert (model.name, model.kind, model.default) == ("model", model.POSITIONAL_OR_KEYWORD, model.empty)
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert {p.name: p.default for p in parameters} == {
        name: field.default for name, field in FIELDS.items() if name != "model"
    }


def test_help_of_the_library_explains_every_field():
    explained = inspect.getdoc(LLM.__init__) or ""
    assert all(f"- `{name}`" in explained for name in FIELDS)


@pytest.mark.parametrize("command", LOADING)
def test_every_command_that_loads_an_engine_takes_every_field(command: str):
    options = options_of(command)
    for name in FIELDS.keys() - FOR_PYTHON - {"model"}:
        assert (options[name].default, options[name].help) == (FIELDS[name].default, HELPS[name])
    assert options["model"].default is None  # the bundled model


def test_a_plan_takes_every_field_that_changes_memory():
    options = options_of("plan")
    left_out = {"adapter", "cache_dir", "verifier_shares_ids"}
    assert FIELDS.keys() - options.keys() == FOR_PYTHON | left_out
    for name in FIELDS.keys() & options.keys() - {"model"}:
        assert (options[name].default, options[name].help) == (FIELDS[name].default, HELPS[name])


def test_bounds_of_the_command_line_are_those_of_the_library():
    for name in ("max_num_batched_tokens", "max_context", "max_num_logits"):
        option = f"--{name.replace('_', '-')}"
        assert_mistake(
            CliRunner().invoke(app, ["score", "a", "b", option, "0"]), option, "than or equal to 1"
        )
        with pytest.raises(ConfigError, match=f"{name} is 0, expected a positive integer"):
            options_with(name, 0)


def test_lm_eval_takes_every_field_that_changes_answers_or_memory():
    left_out = {"model", "load_weights", "chunks", "progress"}
    given = {name: value for name, value in OTHERS.items() if name not in left_out}
    assert given.keys() == FIELDS.keys() - left_out
    assert read_model_arguments(given).of_llm == given


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"model", "chunks"}))
def test_other_values_than_the_default_are_taken_as_they_are(name: str):
    assert getattr(options_with(name, OTHERS[name]), name) == OTHERS[name]
    assert OTHERS[name] != FIELDS[name].default


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("dtype", "int8", "one of 'auto', 'float32', 'bfloat16', 'float16'"),
        ("kernels", "cuda", "one of 'auto', 'triton', 'xla'"),
        ("kv_cache_dtype", "fp8_e5m2", "one of 'auto', 'fp8'"),
        ("memory", "24 Gb of it", "bytes such as 17179869184, '24G' or '24GiB'"),
        ("kv_pool", 0, "bytes such as 17179869184, '24G' or '24GiB'"),
        ("max_context", 1.5, "a positive integer"),
        ("hf_overrides", "rope", "a mapping or None"),
        ("cache_dir", 5, "a text or a path or None"),
        ("chunks", 4, "ChunkConfig or None"),
        ("warmup", 1, "True or False"),
    ],
)
def test_a_value_that_no_model_has_is_told(name: str, value: Any, expected: str):
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}, expected {expected}")):
        options_with(name, value)


def test_choices_are_those_of_who_reads_them():
    assert get_args(Kernels) == KERNELS
    assert get_args(WeightForm) == QUANTIZATIONS
    assert get_args(KvCacheDtype) == KV_CACHE_DTYPES
    assert {"auto", *(dtype.name for dtype in STORED.values())} == set(DTYPES)


def test_the_documents_table_says_what_the_declaration_says():
    rows = {}
    for line in (ROOT / "docs" / "serving.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").replace("`", "").split(" | ")]
        if len(cells) == 3 and cells[0].startswith("--"):
            rows[cells[0].split(",")[0]] = cells[1:]  # a switch names its opposite too
    for name in FIELDS.keys() - FOR_PYTHON - {"model"}:
        told, default = rows[f"--{name.replace('_', '-')}"]
        shown = "" if default in ("none", "off") else f" [default: {default}]"
        assert f"{told[0].upper()}{told[1:]}.{shown}" == HELPS[name]
