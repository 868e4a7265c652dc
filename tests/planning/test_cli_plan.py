"""`jdllm plan`: what it prints, to which stream, and with which exit code."""

import itertools
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from jdllm.cli import app
from jdllm.errors import ConfigError
from jdllm.planning.aot import is_hopper
from jdllm.planning.buckets import row_bucket
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
    },
    "dream": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
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
    *("plan_seconds", "stop_reason", "target", "cache_policy", "compiler_peak_bytes"),
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


def run(model: Path | str, *options: str, context: int = 32768, memory: str = "24GiB") -> Result:
    shape = ("--context", str(context), "--memory", memory)
    return CliRunner().invoke(app, ["plan", str(model), *shape, *options])


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
        enough = got["peak_bytes"] <= size * GIB and got["host_bytes"] <= 128 * GIB
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
    assert lines[0] == f"fits on h200: 131072 tokens need {peak:.2f} GiB of the device's 24.00 GiB"
    table = {line[:12].strip(): line[12:].strip() for line in lines[2:8]}
    assert table["weights"] == f"{got['weights_bytes'] / GIB:.2f} GiB"
    assert table["activations"] == f"{got['activation_peak_bytes'] / GIB:.2f} GiB"
    assert (table["KV pool"], table["overhead"], table["host memory"]) == ("0 B", "896.00 MiB", "0 B")
    assert "chunks: " + ", ".join(f"{name} {count}" for name, count in got["chunks"].items()) in lines
    assert "host tiers: none" in lines
    assert any(line.startswith(f"{got['peak_op']}: ") for line in lines)
    assert f"predicted peak of activations: {table['activations']}" in lines
    assert "compiler: not checked" in lines
    without = got["max_context_without_host_tiers"]
    assert lines[-1] == f"longest context: {got['max_context']} tokens ({without} without host tiers)"
    assert run(llada, "--no-check", "--no-host-tiers").stdout.endswith(f"longest context: {without} tokens\n")


def test_what_is_in_host_memory(llada: Path):
    got = facts(llada, context=1 << 20)
    assert got["host_tiers"] == ["residual"]
    assert 0 < got["host_bytes"] <= got["host_budget_bytes"] == 128 * GIB
    result = run(llada, "--no-check", context=1 << 20)
    assert "host tiers: residual (4096 rows at a time)" in result.stdout.splitlines()
    assert facts(llada, memory="8GiB")["host_tiers"] == ["residual", "kv", "weights"]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_context_that_does_not_fit_is_one_line_and_exit_code_3(llada: Path, as_json: bool):
    options = ("--no-host-tiers", *(("--json",) if as_json else ("--no-check",)))
    result = run(llada, *options, context=1 << 20)
    got = facts(llada, "--no-host-tiers", context=1 << 20, code=3)
    assert result.exit_code == 3
    assert result.stderr == (
        f"error: 1048576 tokens need {got['peak_bytes'] / GIB:.2f} GiB of the device's 24.00 GiB:"
        f" the longest context that fits is {got['max_context']} tokens\n"
    )
    if as_json:
        assert json.loads(result.stdout)["fits"] is False
    else:
        assert result.stdout.startswith("does not fit on h200: 1048576 tokens need")


def test_too_little_host_memory(llada: Path):
    result = run(llada, "--json", "--host-memory", "1GiB", context=1 << 20)
    got = json.loads(result.stdout)
    assert result.exit_code == 3
    assert got["peak_bytes"] <= got["budget_bytes"]
    assert got["stop_reason"] == "host memory is too small"
    host = f"{got['host_bytes'] / GIB:.2f} GiB of 1.00 GiB host memory"
    assert f" and {host}: the longest context that fits is {got['max_context']} tokens\n" in result.stderr


def test_weights_alone_are_too_much(llada: Path):
    result = run(llada, "--json", "--no-host-tiers", memory="8GiB")
    assert (result.exit_code, json.loads(result.stdout)["max_context"]) == (3, 0)
    assert result.stderr.endswith("GiB of the device's 8.00 GiB: no context fits\n")


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


def test_missing_options(llada: Path):
    assert_mistake(CliRunner().invoke(app, ["plan", str(llada), "--context", "1"]), "--memory")


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

    monkeypatch.setattr("jdllm.planning.verify.compiler_temp_bytes", compiler_temp_bytes)
    quiet = facts(llada, "--target", "a100")
    assert (asked, quiet["compiler_peak_bytes"]) == ([], None)
    got = facts(llada, "--target", "a100", "--check")
    assert asked == [(4096, False, 32768, "a100")]
    assert got["compiler_peak_bytes"] == got["peak_bytes"] - GIB
    lines = run(llada, "--target", "a100").stdout.splitlines()
    planned = got["activation_peak_bytes"] / GIB
    assert f"compiler: {planned - 1:.2f} GiB (plan +{1 / (planned - 1):.1%})" in lines


def test_without_a_compiler(llada: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.planning.verify.compiler_temp_bytes", lambda *_: None)
    assert facts(llada, "--check")["compiler_peak_bytes"] is None
    assert "compiler: not checked (needs the cuda13 extra)\n" in run(llada).stdout
    tiered = "compiler: not checked (with host tiers the step is many executables)\n"
    assert tiered in run(llada, context=1 << 20).stdout


def test_the_check_needs_a_mask_id_and_gets_one(configs: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    ids = []
    monkeypatch.setattr(
        "jdllm.planning.verify.compiler_temp_bytes", lambda workload, *_: ids.append(workload.config.mask_id)
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
