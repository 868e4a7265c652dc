"""Quantised checkpoints whose numbers are on the device as they were published."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jdllm import cli
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.offload.placement import host_weight_bytes
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import param_bytes
from jdllm.planning.templates import step_template
from jdllm.quantised import WeightForm
from tests.helpers import GOLDENS, slow
from tests.published import SCHEMES, plain_checkpoint, publish, with_values

ENGINE: dict[str, Any] = {"max_num_batched_tokens": 128, "kv_pool": "1MiB", "progress": False}
SAMPLING = SamplingParams(gen_length=16, steps=8)
MIB = 2**20


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_checkpoint(tmp_path_factory.mktemp("published") / "plain")


def planned(path: Path, *options: str) -> dict[str, Any]:
    asked = ["plan", str(path), "--context", "64", "--target", "h200", "--no-check", "--json", *options]
    return json.loads(CliRunner().invoke(cli.app, asked).stdout)


@pytest.mark.parametrize(
    "name", ["awq", *map(slow, ("gptq", "w4a16", "w4a16_zeros", "gptq_8", "fp8_dynamic"))]
)
def test_tokens_are_those_of_a_plain_checkpoint_of_the_values(name: str, plain: Path, tmp_path: Path):
    path, scheme, found = tmp_path / name, SCHEMES[name], []
    matrices = publish(plain, path, scheme)
    forms: dict[Path, WeightForm | None] = {path: scheme.form}
    forms[with_values(plain, tmp_path / "values", matrices, scheme.form)] = None
    for one, form in forms.items():
        with LLM(one, dtype="float32", **ENGINE) as llm:
            assert llm.config.quantization == form
            outputs = llm.generate(prompt_token_ids=[[5, 6, 7], [20, 21]], sampling=SAMPLING)
            found.append([out.token_ids for out in outputs])
            weights = llm.account.weights
        assert planned(one, "--dtype", "float32", "--memory", "2GiB")["weights_bytes"] == weights
        assert weights == param_bytes(config_from_hf(one).quantised(form), "float32")
    assert found[0] == found[1]


@pytest.mark.slow
def test_16_bits_are_had_by_a_configuration_that_says_nothing_of_numbers(plain: Path, tmp_path: Path):
    publish(plain, tmp_path / "gptq", SCHEMES["gptq"])
    overrides = {"quantization_config": None}
    with LLM(tmp_path / "gptq", hf_overrides=overrides, **ENGINE) as llm:
        assert llm.config.quantization is None
        told = planned(tmp_path / "gptq", "--hf-overrides", json.dumps(overrides), "--memory", "2GiB")
        assert told["weights_bytes"] == llm.account.weights


@pytest.mark.slow
def test_an_adapter_is_merged_into_16_bits(tmp_path: Path):
    publish(GOLDENS / "llama", tmp_path / "gptq", SCHEMES["gptq_rows"])
    for adapter, form in ((None, "int4"), (GOLDENS / "lora" / "linear", None)):
        with LLM(tmp_path / "gptq", adapter=adapter, **ENGINE) as llm:
            assert llm.config.quantization == form


@pytest.fixture
def no_workspace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.planning.templates.WORKSPACE", 0)
    step_template.cache_clear()
    yield
    step_template.cache_clear()


@pytest.mark.slow
def test_layers_in_host_memory_stay_in_few_bits(no_workspace: None, tmp_path: Path):
    publish(plain_checkpoint(tmp_path / "plain", num_layers=24), tmp_path / "gptq", SCHEMES["gptq"])
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 256, "progress": False}
    with LLM(tmp_path / "gptq", memory=3 * MIB, **options) as llm:
        assert (llm.config.quantization, llm.account.offloaded) == ("int4", 0)
    options["memory"] = 2 * MIB
    with LLM(tmp_path / "gptq", **options) as llm:
        assert llm.config.quantization == "int4"
        assert llm.account.offloaded
        in_few_bits = host_weight_bytes(llm.config, "bfloat16", llm.account.offloaded)
        assert llm.account.streamed == in_few_bits < 24 * MIB // 8
