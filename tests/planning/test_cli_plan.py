"""The answers of `jdllm plan`: what fits, how, and what does not."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.errors import ConfigError
from jdllm.pallas.device import Target
from jdllm.planning.aot import device_of
from jdllm.planning.buckets import row_bucket
from tests.helpers import Golden
from tests.planning.plan_command import GIB, SHAPES, assert_mistake, facts, invoke, run

pytestmark = pytest.mark.usefixtures("no_card")

LONGEST = 1 << 24
# Parameters of the published models, as their cards round them.
BILLIONS = {"llada": 8.02, "dream": 7.62, "llada_moe": 7.36}
KEYS = {
    *("fits", "peak_bytes", "activation_peak_bytes", "weights_bytes", "kv_pool_bytes", "overhead_bytes"),
    *("batch_bytes", "budget_bytes", "peak_op", "peak_to_average", "chunks", "host_tiers", "host_bytes"),
    *("host_budget_bytes", "context", "rows", "head_rows", "max_context", "max_context_without_host_tiers"),
    *("plan_seconds", "stop_reason", "target", "cache_policy", "compiler_peak_bytes", "card", "dtype"),
    *(
        "positions",
        "needed_bytes",
        "offloaded_layers",
        "streamed_bytes",
        "step_seconds",
        "step_seconds_at_measured_rate",
    ),
    *(
        "verifier_bytes",
        "max_context_step_seconds",
        "max_context_without_host_tiers_step_seconds",
        "engine",
        "options",
        "layered",
    ),
}


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
@pytest.mark.slow
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


@settings(max_examples=4)
@given(st.sampled_from(sorted(SHAPES)), st.lists(st.integers(1, 140), min_size=2, max_size=2, unique=True))
@pytest.mark.slow
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
    exact = facts(llada, memory="19GiB", context=65536)
    assert exact["chunks"]["ffn"] > 1
    cached = facts(llada, "--cache-policy", "prefix", code=3, memory="36GiB", context=131072)
    assert (set(cached["chunks"].values()), cached["host_tiers"]) == ({1}, [])
    assert 0 < cached["max_context_without_host_tiers"] < cached["max_context"] < 131072


def test_a_request_beyond_the_pool_runs_layer_by_layer(llada: Path, tmp_path: Path):
    got = facts(llada, "--cache-policy", "dual", context=65536)
    layered = got["layered"]
    assert (got["fits"], got["options"], got["host_bytes"]) == (True, {}, layered["host_bytes"])
    assert layered["host_bytes"] == (32 - layered["layering"]["kept"]) * 65536 * 2 * 4096 * 2
    assert got["peak_bytes"] == max(layered["prompt_bytes"], layered["token_bytes"]) <= 24 * GIB
    output = run(llada, "--cache-policy", "dual", context=65536).stdout
    assert output.startswith("fits on h200, layer by layer: 65536 tokens (beyond the 4096 positions")
    assert "of 32 layers leave for host memory meanwhile" in output
    assert "longest context without host memory: 15808 tokens" in output
    plot = run(llada, "--cache-policy", "dual", "--plot", str(tmp_path / "a.svg"), context=65536)
    assert_mistake(plot, "--plot draws a step that runs at once")


def test_the_options_reach_the_plan(llada: Path):
    got = facts(
        llada, "--mask-ratio", "0.25", "--max-num-logits", "512", "--dtype", "float32", memory="60GiB"
    )
    assert got["head_rows"] == 8192
    assert got["chunks"]["logits"] == 16
    assert got["weights_bytes"] / 4e9 == pytest.approx(BILLIONS["llada"], rel=0.002)


def test_what_operators_choose_by_on_a_described_card():
    assert device_of("h100") == Target(True, 9.0)
    assert device_of("rtx3090", "xla") == Target(True, 8.6, "xla")
    with pytest.raises(ConfigError, match="unknown target 'h201': expected one of a100-40gb, a100-80gb"):
        device_of("h201")
    with pytest.raises(ConfigError, match="kernels are one of auto, triton, xla, not 'cuda'"):
        device_of("h100", "cuda")


@pytest.mark.slow
def test_layers_go_to_host_memory_where_the_weights_do_not_fit(llada: Path):
    got = facts(llada, memory="12GiB", context=4096)
    assert got["fits"]
    assert got["host_tiers"] == ["weights"]
    assert 0 < got["offloaded_layers"] < 32
    arriving = 2 * got["streamed_bytes"] / got["offloaded_layers"]
    whole = got["weights_bytes"] - arriving + got["host_bytes"]
    assert whole / 2e9 == pytest.approx(BILLIONS["llada"], rel=0.002)
    assert got["peak_bytes"] <= 12 * GIB
    assert got["step_seconds"] == pytest.approx(got["streamed_bytes"] / 51e9)
    assert got["max_context"] >= 8192
    assert got["max_context_without_host_tiers"] == 0
    output = run(llada, "--no-check", memory="12GiB", context=4096).stdout
    assert f"host tiers: weights of {got['offloaded_layers']} of 32 layers, " in output
    assert f"weights of {got['offloaded_layers']} layers are in host memory: each step moves" in output
    refused = facts(llada, "--host-memory", "0", memory="12GiB", context=4096, code=3)
    assert (refused["fits"], refused["offloaded_layers"]) == (False, 0)


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


@pytest.mark.slow
def test_too_little_host_memory(llada: Path):
    got = facts(llada, "--host-memory", "1GiB", context=1 << 20, code=3)
    assert got["stop_reason"] == "host memory is too small"
    assert got["needed_bytes"] > got["budget_bytes"]
    assert facts(llada, "--host-memory", "1GiB", context=1 << 20, memory=str(got["needed_bytes"]))["fits"]


@pytest.mark.slow
def test_weights_alone_are_too_much(llada: Path):
    result = run(llada, "--json", "--no-host-tiers", memory="8GiB")
    assert (result.exit_code, json.loads(result.stdout)["max_context"]) == (3, 0)
    assert result.stderr.endswith("and the budget is 8.00 GiB: no context fits\n")
    lines = run(llada, "--no-check", "--no-host-tiers", memory="8GiB").stdout.splitlines()
    assert lines[-3:] == ["longest context: none fits", "", "LLM in this budget: no step fits"]


@pytest.mark.slow
def test_without_a_context_the_longest_is_planned(llada: Path):
    result = invoke(llada, "--memory", "24GiB", "--json")
    got = json.loads(result.stdout)
    assert (result.exit_code, got["context"]) == (0, got["max_context"])
    assert got["step_seconds"] == got["max_context_step_seconds"]
    offloaded = invoke(llada, "--memory", "8GiB", "--json")
    got = json.loads(offloaded.stdout)
    assert (offloaded.exit_code, got["context"], got["offloaded_layers"] > 0) == (0, got["max_context"], True)
    nothing = invoke(llada, "--memory", "2GiB", "--json")
    assert (nothing.exit_code, json.loads(nothing.stdout)["fits"]) == (3, False)


@pytest.mark.slow
def test_an_engine_in_the_budget(llada: Path):
    engine = facts(llada)["engine"]
    assert engine["rows"] == 12288
    page = 2 * 64 * 32 * 4096 * 2
    assert engine["kv_pool_bytes"] == engine["kv_pool_pages"] * page
    free = (engine["kv_pool_pages"] - 1) * 64
    assert engine["cached_requests"] == {"1024": free // 1024, "4096": free // 4096, "16384": 0}
    assert engine["max_context_without_pool"] == facts(llada)["max_context"]
    assert engine["rows"] <= engine["max_cached_context"] <= engine["max_context"]
    held = engine["kv_pool_bytes"] + engine["largest_step_bytes"]
    assert 0 <= 24 * GIB - held - facts(llada)["weights_bytes"] - (896 << 20) < engine["kv_pool_bytes"] / 8
    beside = str(24 * GIB - engine["kv_pool_bytes"])
    alone = facts(llada, "--no-host-tiers", context=engine["max_context"], memory=beside)
    assert (alone["fits"], alone["host_tiers"]) == (True, [])


def test_the_options_reach_the_engine(llada: Path):
    sparse = facts(llada, "--cache", "sparse", "--retention", "0.25", context=4096)["engine"]
    usual = facts(llada)["engine"]
    assert sparse["kv_pool_pages"] == usual["kv_pool_pages"]
    assert sparse["cached_requests"]["1024"] == (usual["kv_pool_pages"] - 1) // 4
    small = facts(llada, "--max-num-batched-tokens", "1024")["engine"]
    assert small["rows"] == 1024
    assert small["largest_step_bytes"] < usual["largest_step_bytes"] / 2
    assert small["kv_pool_pages"] >= usual["kv_pool_pages"]


def test_no_engine_in_too_little(llada: Path):
    assert facts(llada, "--no-host-tiers", memory="8GiB", code=3)["engine"] is None


def test_a_verifier_takes_its_bytes_from_steps_and_pool(configs: dict[str, Path], tmp_path: Path):
    """Qwen2.5-0.5B beside Dream: its weights, and a page for each 64 rows of a step and for each request."""
    shape = {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    stated = json.loads((Golden("qwen2").directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | shape))
    verifier = "--verifier", str(tmp_path)
    alone, beside = (facts(configs["dream"], *options, memory="40GiB") for options in ((), verifier))
    keys = (1 + 8192 // 64 + 64) * 64 * 24 * 2 * 2 * 64 * 2
    assert alone["verifier_bytes"] == 0
    assert beside["verifier_bytes"] == pytest.approx(2 * 494e6 + keys, rel=0.002)
    assert beside["overhead_bytes"] == alone["overhead_bytes"]
    assert beside["peak_bytes"] == alone["peak_bytes"] + beside["verifier_bytes"]
    longest = "max_context_without_host_tiers"
    assert beside[longest] < alone[longest]
    assert beside["engine"]["rows"] == 8192
    table = run(configs["dream"], *verifier, "--no-check", memory="40GiB").stdout
    assert f"verifier    {beside['verifier_bytes'] / GIB:>8.2f} GiB" in table
    assert "GiB" not in next(line for line in table.splitlines() if line.startswith("overhead"))


def test_a_verifier_that_cannot_verify_is_refused(configs: dict[str, Path]):
    model, causal = configs["dream"], Golden("qwen2").directory
    assert_mistake(run(model, "--verifier", str(model)), "dream model, whose attention is not causal")
    assert_mistake(run(causal, "--verifier", str(causal)), "a verifier is for models that denoise")
