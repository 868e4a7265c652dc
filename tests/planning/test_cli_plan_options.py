"""Options of `jdllm plan`: what stands for those that are not given, and mistakes."""

import dataclasses
import inspect
import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from typer.main import get_command

from jdllm import LLM
from jdllm.byte_sizes import parse_bytes
from jdllm.cli import app
from jdllm.execution.offload.placement import host_weight_bytes
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import param_bytes
from jdllm.pallas.device import HOPPER
from jdllm.planning.budget import Budget
from jdllm.planning.card import Card
from jdllm.planning.offloading import account_with_offloading
from tests.helpers import Golden
from tests.planning.plan_command import GIB, assert_mistake, facts, invoke, run

pytestmark = pytest.mark.usefixtures("no_card")

LONGEST = 1 << 24


@pytest.mark.slow
def test_spellings_of_a_size(llada: Path):
    same = {facts(llada, memory=text)["budget_bytes"] for text in ("24G", "24GiB", "24 gib", str(24 * GIB))}
    assert same == {24 * GIB}


def test_options_and_defaults_are_those_of_the_library():
    planned = {option.name: option for option in get_command(app).commands["plan"].params}  # type: ignore[attr-defined]
    library = inspect.signature(LLM).parameters
    for name in ("dtype", "max_num_batched_tokens", "max_num_logits", "memory", "host_memory"):
        assert planned[name].default == library[name].default
    fields = {field.name: field for field in dataclasses.fields(Budget)}
    assert fields["host"].default == parse_bytes(library["host_memory"].default)


@pytest.mark.slow
def test_the_type_is_that_of_the_checkpoint(llada: Path, tmp_path: Path):
    values = json.loads((llada / "config.json").read_text())
    for stated, expected in (("float32", "float32"), ("float16", "float16"), (None, "bfloat16")):
        (tmp_path / "config.json").write_text(json.dumps(values | {"torch_dtype": stated}))
        assert facts(tmp_path / "config.json", memory="60GiB")["dtype"] == expected
    assert facts(tmp_path, "--dtype", "float16")["dtype"] == "float16"


@pytest.mark.slow
def test_quantised_weights_are_counted_as_they_are_kept(llada: Path):
    config = config_from_hf(llada)
    for form in (None, "int8", "int4", "fp8"):
        options = () if form is None else ("--quantization", form)
        got = facts(llada, "--dtype", "bfloat16", *options, memory="20GiB")
        assert got["weights_bytes"] == param_bytes(config.quantised(form), "bfloat16")


@pytest.mark.slow
def test_a_pool_in_8_bits_is_counted_as_it_is_kept(llada: Path):
    """Heads of 128 numbers: a byte for each, and two bytes for each head of a row."""
    options = "--dtype", "bfloat16", "--cache-policy", "dual"
    plain, rounded = (
        facts(llada, *options, "--kv-cache-dtype", form, context=4096)["kv_pool_bytes"]
        for form in ("auto", "fp8")
    )
    assert rounded * 2 * 128 == plain * (128 + 2)


@pytest.mark.slow
def test_layers_in_host_memory_stay_in_few_bits(llada: Path, tmp_path: Path):
    values, config = json.loads((llada / "config.json").read_text()), config_from_hf(llada)
    words = {"quant_method": "jdllm", "format": "int4"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": words}))
    in_few_bits = config.quantised("int4")
    assert facts(tmp_path, memory="9GiB")["weights_bytes"] == param_bytes(in_few_bits, "bfloat16")
    found = facts(tmp_path, memory="5GiB")
    assert found["offloaded_layers"]
    streamed = host_weight_bytes(in_few_bits, "bfloat16", found["offloaded_layers"])
    assert found["streamed_bytes"] == streamed


H100 = Card("NVIDIA H100 80GB HBM3", "h100", 80 * GIB)
B300 = Card("NVIDIA B300 SXM6 AC", "h200", 268 * GIB, described=False)


@pytest.mark.slow
def test_card_and_memory_default_to_the_card_that_is_here(llada: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.planning.card.visible_card", lambda: H100)
    result = invoke(llada, "--no-check", "--context", "4096")
    got = json.loads(invoke(llada, "--json", "--context", "4096").stdout)
    assert (got["card"], got["target"]) == (H100.name, "h100")
    assert got["budget_bytes"] == 60 * GIB + (768 << 20)
    assert result.stdout.splitlines()[:2] == [
        f"{H100.name} is here: planned for h100 (--target)",
        f"memory is the 60.75 GiB that XLA may allot by default of {H100.name} (--memory)",
    ]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert json.loads(invoke(llada, "--json").stdout)["budget_bytes"] == 40 * GIB + (768 << 20)
    other = json.loads(invoke(llada, "--json", "--target", "a100-80gb").stdout)
    assert (other["card"], other["budget_bytes"]) == ("a100-80gb", 85100068864 // 2 + (768 << 20))


@pytest.mark.parametrize("options", [(), ("--target", "auto"), ("--target", "h100")])
def test_the_card_that_is_here_is_asked(
    llada: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
):
    monkeypatch.setattr("jdllm.planning.card.visible_card", lambda: H100)
    got = json.loads(invoke(llada, "--json", *options).stdout)
    assert (got["card"], got["budget_bytes"]) == (H100.name, 60 * GIB + (768 << 20))
    if options == ("--target", "auto"):
        said = invoke(llada, "--no-check", "--memory", "24GiB", *options).stdout.splitlines()
        assert said[0] == f"{H100.name} is here: planned for h100 (--target)"


def test_a_card_that_no_description_is_of(llada: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.planning.card.visible_card", lambda: B300)
    said = invoke(llada, "--no-check", "--memory", "24GiB", "--context", "4096").stdout.splitlines()
    why = "of a compute capability that no target has"
    assert said[0] == f"{B300.name} is here, {why}: planned for h200 (--target)"
    assert json.loads(invoke(llada, "--json", "--target", "h200").stdout)["card"] == "h200"


def test_without_a_card_the_description_of_one_is_taken_and_named(llada: Path):
    result = invoke(llada, "--no-check", "--memory", "24GiB", "--context", "4096")
    assert result.stdout.splitlines()[0] == "no CUDA device is visible: planned for h200 (--target)"
    got = json.loads(invoke(llada, "--json").stdout)
    assert got["budget_bytes"] == 150109880320 * 3 // 4 + (768 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "a100"), ("--target is 'a100'", "auto, a100-40gb, a100-80gb, b200", "rtx5090")),
        (("--target", "auto"), ("no CUDA device is visible", "--target h200")),
        (("--dtype", "int8"), ("--dtype is 'int8'", "bfloat16")),
        (("--cache-policy", "triple"), ("'triple'", "prefix")),
        (("--mask-ratio", "0"), ("mask ratio",)),
        (("--retention", "2"), ("retention",)),
        (("--max-num-logits", "0"), ("--max-num-logits",)),
        (("--max-num-batched-tokens", "0"), ("--max-num-batched-tokens",)),
        (("--host-memory", "much"), ("--host-memory is 'much'", "24GiB")),
        (("--memory", "-1"), ("--memory is '-1'",)),
        (("--context", "0"), ("context is 0",)),
        (("--context", str(LONGEST + 1)), ("context is", str(LONGEST))),
        (("--plot", "no/where.png"), ("no is not a directory",)),
        (("--plot", "picture.docx"), ("picture.docx", "png")),
    ],
)
def test_wrong_options(llada: Path, options: tuple[str, ...], words: tuple[str, ...]):
    assert_mistake(run(llada, "--json", "--no-host-tiers", *options), *words)


def test_a_model_is_a_directory_or_a_file_or_a_hub_id(
    llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lone = tmp_path / "any name.json"
    lone.write_text((llada / "config.json").read_text())

    def download(repo_id: str, filename: str) -> str:
        assert (repo_id, filename) == ("org/name", "config.json")
        return str(llada / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    models = (llada, llada / "config.json", lone, "org/name")
    same = [facts(model, "--no-host-tiers") | {"plan_seconds": 0} for model in models]
    assert all(got == same[0] for got in same)


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert_mistake(run("nobody/nothing"), "nobody/nothing", "hub")
    assert_mistake(run("./nobody"), "no directory nobody")
    assert_mistake(run("~no-such-user/model"), "~no-such-user/model")
    assert_mistake(run(tmp_path), "config.json")
    (tmp_path / "config.json").write_text("{")
    assert_mistake(run(tmp_path / "config.json"), "not readable as JSON")


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    """The configuration of a causal model of 8B."""
    values = json.loads((Golden("llama").directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | CAUSAL))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llada", ["--memory", "2GiB", "--no-host-tiers"]),
        (
            "dream",
            ["--prefilling", "dream", "--context", "131072", "--memory", "14GiB", "--no-host-tiers"],
        ),
        ("dream", ["--prefilling", '{"chunks_kept": 4096}', "--context", "4194304", "--memory", "24GiB"]),
        ("causal", ["--memory", "10GiB", "--host-memory", "0"]),
        ("causal", ["--memory", "24GiB", "--host-memory", "0", "--context", "1000000"]),
        ("llada", ["--memory", "24GiB", "--kv-pool", "20GiB"]),
    ],
)
def test_what_does_not_fit_ends_with_3(
    configs: dict[str, Path], causal: Path, family: str, options: list[str]
):
    result = invoke(configs.get(family, causal), "--target", "h100", "--json", *options)
    assert result.exit_code == 3
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


CAUSAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def test_values_of_the_configuration_are_overridden(llada: Path):
    got = facts(llada, "--hf-overrides", '{"max_sequence_length": 9000, "n_layers": 16}', context=4096)
    usual = facts(llada, context=4096)
    assert (usual["positions"], got["positions"]) == (4096, 9000)
    assert got["weights_bytes"] < 0.6 * usual["weights_bytes"]
    assert_mistake(invoke(llada, "--hf-overrides", "[1]"), "--hf-overrides is '[1]', expected a JSON object")


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["8GiB", "12GiB"])
def test_a_causal_model_whose_weights_do_not_fit(causal: Path, memory: str):
    """An engine in the budget takes what the plan promises, and layers in host memory belong to it."""
    found = invoke(causal, "--memory", memory, "--host-memory", "40GiB", "--json")
    told = json.loads(found.stdout)
    assert (found.exit_code, told["fits"]) == (0, True)
    config = config_from_hf(causal)
    budget = Budget(int(memory.removesuffix("GiB")) * GIB, host=40 * GIB)
    account = account_with_offloading(config, "bfloat16", budget, device=HOPPER)
    assert told["offloaded_layers"] == account.offloaded > 0
    assert told["streamed_weights_bytes"] == host_weight_bytes(config, "bfloat16", account.offloaded)
    assert told["host_bytes"] <= 40 * GIB
    assert told["token_seconds"] >= told["streamed_weights_bytes"] / 51e9
    shorter = json.loads(invoke(causal, "--memory", memory, "--context", "1024", "--json").stdout)
    assert shorter["transfer_seconds"] == shorter["streamed_weights_bytes"] / 51e9
    refused = invoke(causal, "--memory", memory, "--host-memory", "1GiB")
    assert refused.exit_code == 3
    assert "--host-memory is 1.00 GiB" in refused.output
