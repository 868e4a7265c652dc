"""`jdllm plan`: what it prints, to which stream, and with which exit code."""

import dataclasses
import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner, Result

from jdllm import LLM
from jdllm.cli import app
from jdllm.errors import ConfigError
from jdllm.planning.aot import is_hopper
from jdllm.planning.buckets import row_bucket
from jdllm.planning.budget import Budget, parse_bytes
from jdllm.planning.card import Card
from tests.helpers import Golden

GIB = 2**30
LONGEST = 1 << 24

# Sizes of the published models, in the words of each family's config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "llada": {
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "mlp_hidden_size": 12288,
        "vocab_size": 126464,
        "embedding_size": 126464,
        "torch_dtype": "bfloat16",
    },
    "dream": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "torch_dtype": "bfloat16",
        "vocab_size": 152064,
    },
    "llada_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "dense_intermediate_size": 8192,
        "expert_intermediate_size": 1024,
        "moe_layer_freq": [1] * 16,
        "num_experts": 64,
        "torch_dtype": "bfloat16",
        "num_experts_per_tok": 8,
        "vocab_size": 157184,
        "mask_token_id": None,
    },
}
# Parameters of the published models, as their cards round them.
BILLIONS = {"llada": 8.02, "dream": 7.62, "llada_moe": 7.36}
KEYS = {
    *("fits", "peak_bytes", "activation_peak_bytes", "weights_bytes", "kv_pool_bytes", "overhead_bytes"),
    *("batch_bytes", "budget_bytes", "peak_op", "peak_to_average", "chunks", "host_tiers", "host_bytes"),
    *("host_budget_bytes", "context", "rows", "head_rows", "max_context", "max_context_without_host_tiers"),
    *("plan_seconds", "stop_reason", "target", "cache_policy", "compiler_peak_bytes", "card", "dtype"),
    *("positions", "needed_bytes", "weights_tier_would_fit", "step_seconds", "step_seconds_at_measured_rate"),
    *("max_context_step_seconds", "max_context_without_host_tiers_step_seconds"),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each family, with a config.json of the published shape and nothing else."""
    directories = {}
    for family, sizes in SHAPES.items():
        values = json.loads((Golden(family).directory / "config.json").read_text())
        directories[family] = tmp_path_factory.mktemp(family)
        (directories[family] / "config.json").write_text(json.dumps({**values, **sizes}))
    return directories


@pytest.fixture
def llada(configs: dict[str, Path]) -> Path:
    return configs["llada"]


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.planning.card.visible_card", lambda: None)


def invoke(model: Path | str, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(model), *options])


def run(model: Path | str, *options: str, context: int = 32768, memory: str = "24GiB") -> Result:
    shape = ("--context", str(context), "--memory", memory)
    if "--target" not in options:
        options += ("--target", "h200")
    return invoke(model, *shape, *options)


def facts(model: Path | str, *options: str, code: int = 0, **shape: Any) -> dict[str, Any]:
    result = run(model, *options, "--json", **shape)
    assert result.exit_code == code
    assert (result.stderr == "") == (code == 0)
    return json.loads(result.stdout)


def assert_mistake(result: Result, *words: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("family", SHAPES)
def test_the_account_adds_up(configs: dict[str, Path], family: str):
    got = facts(configs[family], context=131072)
    assert set(got) == KEYS
    assert set(got["chunks"]) == {"logits", "ffn", "query", "kv", "heads"}
    assert got["fits"]
    parts = ("weights_bytes", "kv_pool_bytes", "overhead_bytes", "batch_bytes", "activation_peak_bytes")
    assert got["peak_bytes"] == sum(got[part] for part in parts) <= got["budget_bytes"] == 24 * GIB
    assert got["weights_bytes"] / 2e9 == pytest.approx(BILLIONS[family], rel=0.002)
    assert (got["context"], got["rows"], got["head_rows"]) == (131072, 131072, 65536)
    assert (got["target"], got["cache_policy"], got["compiler_peak_bytes"]) == ("h200", "none", None)
    assert (got["stop_reason"], got["host_tiers"], got["host_bytes"]) == ("fits", [], 0)
    assert 0 < got["plan_seconds"] < 10
    assert got["peak_to_average"] > 1


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("tiers", ["--host-tiers", "--no-host-tiers"])
def test_the_longest_context_fits_and_the_next_does_not(configs: dict[str, Path], family: str, tiers: str):
    longest = facts(configs[family], tiers, "--host-memory", "32GiB")
    limit = longest["max_context" if tiers == "--host-tiers" else "max_context_without_host_tiers"]
    assert limit >= longest["max_context_without_host_tiers"] > 32768
    assert longest["max_context"] == limit
    assert facts(configs[family], tiers, "--host-memory", "32GiB", context=limit)["fits"]
    beyond = row_bucket(limit + 1)
    assert beyond <= LONGEST
    got = facts(configs[family], tiers, "--host-memory", "32GiB", context=beyond, code=3)
    assert not got["fits"]
    assert got["peak_bytes"] > got["budget_bytes"] or got["host_bytes"] > got["host_budget_bytes"]
    assert got["stop_reason"] != "fits"


@settings(max_examples=6)
@given(st.sampled_from(sorted(SHAPES)), st.lists(st.integers(1, 140), min_size=2, max_size=2, unique=True))
def test_more_memory_is_never_a_shorter_context(configs: dict[str, Path], family: str, gib: list[int]):
    longest = []
    for size in sorted(gib):
        result = run(configs[family], "--json", memory=f"{size}GiB")
        got = json.loads(result.stdout)
        enough = got["peak_bytes"] <= size * GIB and got["host_bytes"] <= 64 * GIB
        assert got["fits"] == enough == (result.exit_code == 0)
        longest.append((got["max_context_without_host_tiers"], got["max_context"]))
    for fewer, more in itertools.pairwise(longest):
        assert fewer[0] <= more[0]
        assert fewer[1] <= more[1]


def test_a_policy_keeps_the_keys_and_values_of_all_layers(llada: Path):
    rows = 2 * 32 * 4096 * 2
    assert facts(llada, "--cache-policy", "dual", context=4096)["kv_pool_bytes"] == (64 + 4096) * rows
    sparse = ("--cache-policy", "sparse", "--retention", "0.25")
    assert facts(llada, *sparse, context=4096)["kv_pool_bytes"] == (64 + 4096 // 4) * rows


def test_a_step_with_a_cache_runs_whole_and_on_the_device(llada: Path):
    exact = facts(llada, memory="18GiB")
    assert exact["chunks"]["ffn"] > 1
    cached = facts(llada, "--cache-policy", "dual", code=3, memory="36GiB", context=131072)
    assert (set(cached["chunks"].values()), cached["host_tiers"]) == ({1}, [])
    assert 0 < cached["max_context"] == cached["max_context_without_host_tiers"] < 131072


def test_the_options_reach_the_plan(llada: Path):
    got = facts(
        llada, "--mask-ratio", "0.25", "--max-num-logits", "512", "--dtype", "float32", memory="60GiB"
    )
    assert got["head_rows"] == 8192
    assert got["chunks"]["logits"] == 16
    assert got["weights_bytes"] / 4e9 == pytest.approx(BILLIONS["llada"], rel=0.002)


@pytest.mark.parametrize(
    ("target", "dtype", "in_tiles"),
    [("h200", "bfloat16", 0), ("h200", "float32", 1), ("a100", "bfloat16", 1), ("l40s", "float16", 1)],
)
def test_tiles_of_scores_exist_where_attention_is_not_one_kernel(
    llada: Path, target: str, dtype: str, in_tiles: int
):
    result = run(
        *(llada, "--target", target, "--dtype", dtype, "--mask-ratio", "0.01", "--no-check"),
        context=512,
        memory="80GiB",
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("attention.scratch") == in_tiles


def test_which_targets_are_hopper():
    assert [is_hopper(target) for target in ("h200", "a100", "l40s")] == [True, False, False]
    with pytest.raises(ConfigError, match="unknown target 'h201': expected one of a100, h200, l40s"):
        is_hopper("h201")


def test_tables_for_people(llada: Path):
    result = run(llada, "--no-check", context=131072)
    assert (result.exit_code, result.stderr) == (0, "")
    got = facts(llada, context=131072)
    lines = result.stdout.splitlines()
    peak = got["peak_bytes"] / GIB
    beyond = "(beyond the 4096 positions of the model)"
    assert lines[0] == f"fits on h200: 131072 tokens {beyond} need {peak:.2f} GiB of the device's 24.00 GiB"
    table = {line[:12].strip(): line[12:24].strip() for line in lines[3:9]}
    assert table["weights"] == f"{got['weights_bytes'] / GIB:.2f} GiB"
    assert table["activations"] == f"{got['activation_peak_bytes'] / GIB:.2f} GiB"
    assert (table["KV pool"], table["overhead"], table["host memory"]) == ("0 B", "896.00 MiB", "0 B")
    assert "chunks: " + ", ".join(f"{name} {count}" for name, count in got["chunks"].items()) in lines
    assert "host tiers: none" in lines
    assert any(line.startswith(f"{got['peak_op']}: ") for line in lines)
    assert f"predicted peak of activations: {table['activations']}" in lines
    assert "compiler: not checked" in lines
    without = got["max_context_without_host_tiers"]
    assert lines[-2].startswith(f"longest context: {got['max_context']} tokens {beyond}, ")
    alone = (
        f"{without} tokens {beyond}, {got['max_context_without_host_tiers_step_seconds'] / 60:.1f} min a step"
    )
    assert lines[-1] == f"longest context without host memory: {alone}"
    for none in (("--no-host-tiers",), ("--host-memory", "0")):
        assert run(llada, "--no-check", *none).stdout.endswith(f"\nlongest context: {alone}\n")


def test_the_overhead_is_explained(llada: Path):
    (line,) = [x for x in run(llada, "--no-check").stdout.splitlines() if x.startswith("overhead")]
    assert re.split(r"  +", line)[2] == (
        "CUDA context and libraries 768.00 MiB, kept free for gaps in XLA's pool 128.00 MiB"
    )


@pytest.mark.parametrize(("context", "marked"), [(4096, False), (4097, True)])
def test_contexts_beyond_the_positions_are_marked(llada: Path, context: int, marked: bool):
    first = run(llada, "--no-check", context=context).stdout.splitlines()[0]
    assert ("beyond the 4096 positions of the model" in first) == marked


def test_a_scaled_context_is_within_the_positions(llada: Path, tmp_path: Path):
    values = json.loads((llada / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"rope_scaling": {"rope_type": "linear", "factor": 16.0}})
    )
    assert facts(tmp_path)["positions"] == 65536
    assert "beyond" not in run(tmp_path, "--no-check").stdout.splitlines()[0]


def test_what_is_in_host_memory(llada: Path):
    got = facts(llada, context=1 << 20)
    assert got["host_tiers"] == ["residual"]
    assert 0 < got["host_bytes"] <= got["host_budget_bytes"] == 64 * GIB
    result = run(llada, "--no-check", context=1 << 20)
    assert "host tiers: residual (4096 rows at a time)" in result.stdout.splitlines()


def test_a_tier_that_the_library_does_not_run_is_no_fit(llada: Path):
    got = facts(llada, memory="8GiB", code=3)
    assert not got["fits"]
    assert got["weights_tier_would_fit"]
    assert (got["max_context"], got["max_context_without_host_tiers"]) == (0, 0)
    assert "weights" not in got["host_tiers"]
    result = run(llada, "--no-check", memory="8GiB")
    assert result.exit_code == 3
    (line,) = [line for line in result.stdout.splitlines() if "weights in host memory" in line]
    assert line.endswith("would do: LLM does not run this tier yet")
    assert not facts(llada, "--host-memory", "0", memory="8GiB", code=3)["weights_tier_would_fit"]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_context_that_does_not_fit_is_one_line_and_exit_code_3(llada: Path, as_json: bool):
    options = ("--no-host-tiers", *(("--json",) if as_json else ("--no-check",)))
    result = run(llada, *options, context=1 << 20)
    got = facts(llada, "--no-host-tiers", context=1 << 20, code=3)
    assert result.exit_code == 3
    match = re.fullmatch(
        r"error: a step of 1048576 tokens needs at least (\S+ GiB) on the device, weights included, and the"
        r" budget is 24\.00 GiB: the longest context that fits is (\d+) tokens\n",
        result.stderr,
    )
    assert match is not None
    assert int(match[2]) == got["max_context"]
    assert facts(llada, "--no-host-tiers", context=1 << 20, memory=match[1])["fits"]
    if as_json:
        assert json.loads(result.stdout)["fits"] is False
    else:
        assert result.stdout.startswith("does not fit on h200: 1048576 tokens")


def test_too_little_host_memory(llada: Path):
    got = facts(llada, "--host-memory", "1GiB", context=1 << 20, code=3)
    assert got["stop_reason"] == "host memory is too small"
    assert got["needed_bytes"] > got["budget_bytes"]
    assert facts(llada, "--host-memory", "1GiB", context=1 << 20, memory=str(got["needed_bytes"]))["fits"]


def test_weights_alone_are_too_much(llada: Path):
    result = run(llada, "--json", "--no-host-tiers", memory="8GiB")
    assert (result.exit_code, json.loads(result.stdout)["max_context"]) == (3, 0)
    assert result.stderr.endswith("and the budget is 8.00 GiB: no context fits\n")
    assert run(llada, "--no-check", memory="8GiB").stdout.endswith("longest context: none fits\n")


def test_without_a_context_the_longest_is_planned(llada: Path):
    result = invoke(llada, "--memory", "24GiB", "--json")
    got = json.loads(result.stdout)
    assert (result.exit_code, got["context"]) == (0, got["max_context"])
    assert got["step_seconds"] == got["max_context_step_seconds"]
    nothing = invoke(llada, "--memory", "8GiB", "--json")
    assert (nothing.exit_code, json.loads(nothing.stdout)["fits"]) == (3, False)


def test_spellings_of_a_size(llada: Path):
    same = {facts(llada, memory=text)["budget_bytes"] for text in ("24G", "24GiB", "24 gib", str(24 * GIB))}
    assert same == {24 * GIB}


def test_options_and_defaults_are_those_of_the_library():
    planned = {option.name: option for option in get_command(app).commands["plan"].params}  # type: ignore[attr-defined]
    library = inspect.signature(LLM).parameters
    for name in ("dtype", "max_num_logits", "memory", "host_memory"):
        assert planned[name].default == library[name].default
    fields = {field.name: field for field in dataclasses.fields(Budget)}
    assert fields["host"].default == parse_bytes(library["host_memory"].default)


def test_the_type_is_that_of_the_checkpoint(llada: Path, tmp_path: Path):
    values = json.loads((llada / "config.json").read_text())
    for stated, expected in (("float32", "float32"), ("float16", "float16"), (None, "bfloat16")):
        (tmp_path / "config.json").write_text(json.dumps(values | {"torch_dtype": stated}))
        assert facts(tmp_path / "config.json", memory="60GiB")["dtype"] == expected
    assert facts(tmp_path, "--dtype", "float16")["dtype"] == "float16"


H100 = Card("NVIDIA H100 80GB HBM3", "h200", 80 * GIB)


def test_card_and_memory_default_to_the_card_that_is_here(llada: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.planning.card.visible_card", lambda: H100)
    result = invoke(llada, "--no-check", "--context", "4096")
    got = json.loads(invoke(llada, "--json", "--context", "4096").stdout)
    assert (got["card"], got["target"]) == (H100.name, "h200")
    assert got["budget_bytes"] == 60 * GIB + (768 << 20)
    assert result.stdout.splitlines()[:2] == [
        f"{H100.name} is here: planned for h200 (--target)",
        f"memory is the 60.75 GiB that XLA may allot by default of {H100.name} (--memory)",
    ]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert json.loads(invoke(llada, "--json").stdout)["budget_bytes"] == 40 * GIB + (768 << 20)
    other = json.loads(invoke(llada, "--json", "--target", "a100").stdout)
    assert (other["card"], other["budget_bytes"]) == ("a100", 85100068864 // 2 + (768 << 20))


def test_without_a_card_the_description_of_one_is_taken_and_named(llada: Path):
    result = invoke(llada, "--no-check", "--memory", "24GiB", "--context", "4096")
    assert result.stdout.splitlines()[0] == "no CUDA device is visible: planned for h200 (--target)"
    got = json.loads(invoke(llada, "--json").stdout)
    assert got["budget_bytes"] == 150109880320 * 3 // 4 + (768 << 20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "b200"), ("'b200'", "a100, h200, l40s")),
        (("--dtype", "int8"), ("--dtype is 'int8'", "bfloat16")),
        (("--cache-policy", "triple"), ("'triple'", "prefix")),
        (("--mask-ratio", "0"), ("mask ratio",)),
        (("--retention", "2"), ("retention",)),
        (("--max-num-logits", "0"), ("--max-num-logits",)),
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
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert_mistake(run("nobody/nothing"), "nobody/nothing", "hub")
    assert_mistake(run("./nobody"), "no directory nobody")
    assert_mistake(run("~no-such-user/model"), "~no-such-user/model")
    assert_mistake(run(tmp_path), "config.json")
    (tmp_path / "config.json").write_text("{")
    assert_mistake(run(tmp_path / "config.json"), "not readable as JSON")


def test_the_compilers_word(llada: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def compiler_temp_bytes(workload: Any, plan: Any, target: str) -> int:
        asked.append((workload.config.hidden_size, workload.hopper, plan.context, target))
        return plan.activation.peak_bytes - GIB

    monkeypatch.setattr("jdllm.cli.plan_report.compiler_temp_bytes", compiler_temp_bytes)
    quiet = facts(llada, "--target", "a100")
    assert (asked, quiet["compiler_peak_bytes"]) == ([], None)
    got = facts(llada, "--target", "a100", "--check")
    assert asked == [(4096, False, 32768, "a100")]
    assert got["compiler_peak_bytes"] == got["peak_bytes"] - GIB
    lines = run(llada, "--target", "a100").stdout.splitlines()
    planned = got["activation_peak_bytes"] / GIB
    assert f"compiler: {planned - 1:.2f} GiB (plan +{1 / (planned - 1):.1%})" in lines


def test_without_a_compiler(llada: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.cli.plan_report.compiler_temp_bytes", lambda *_: None)
    assert facts(llada, "--check")["compiler_peak_bytes"] is None
    assert "compiler: not checked (needs the cuda13 or the cuda12 extra)\n" in run(llada).stdout
    tiered = "compiler: not checked (with host tiers the step is many executables)\n"
    assert tiered in run(llada, context=1 << 20).stdout


def test_the_check_needs_a_mask_id_and_gets_one(configs: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    ids = []
    monkeypatch.setattr(
        "jdllm.cli.plan_report.compiler_temp_bytes", lambda workload, *_: ids.append(workload.config.mask_id)
    )
    facts(configs["llada_moe"], "--check")
    assert ids == [157183]


@pytest.mark.parametrize("context", [131072, 1 << 20])
def test_the_timeline_is_drawn(llada: Path, tmp_path: Path, context: int):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.svg"
    facts(llada, "--plot", str(picture), context=context)
    assert picture.read_text().rstrip().endswith("</svg>")
    assert list(tmp_path.iterdir()) == [picture]
