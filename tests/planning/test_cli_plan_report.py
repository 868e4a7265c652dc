"""What `jdllm plan` prints for people, the compiler's word and the picture."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.planning.plan_command import GIB, facts, run

pytestmark = pytest.mark.usefixtures("no_card")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "kernels", "in_tiles"),
    [
        ("h200", "bfloat16", "auto", 0),
        ("h200", "float32", "auto", 0),
        ("h200", "bfloat16", "xla", 1),
        ("a100-80gb", "bfloat16", "auto", 0),
        ("l40s", "float16", "xla", 1),
    ],
)
def test_tiles_of_scores_exist_where_attention_is_not_one_kernel(
    llada: Path, target: str, dtype: str, kernels: str, in_tiles: int
):
    result = run(
        *(llada, "--target", target, "--dtype", dtype, "--kernels", kernels, "--mask-ratio", "0.01"),
        "--no-check",
        context=512,
        memory="80GiB",
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("attention.scratch") == in_tiles


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
    assert lines[-8].startswith(f"longest context: {got['max_context']} tokens {beyond}, ")
    alone = (
        f"{without} tokens {beyond}, {got['max_context_without_host_tiers_step_seconds'] / 60:.1f} min a step"
    )
    assert lines[-7] == f"longest context without host memory: {alone}"
    for none in (("--no-host-tiers",), ("--host-memory", "0")):
        assert run(llada, "--no-check", *none).stdout.splitlines()[-7] == f"longest context: {alone}"


def test_an_engine_in_words(llada: Path):
    engine = facts(llada)["engine"]
    beyond = "(beyond the 4096 positions of the model)"
    held = [f"{count} of {tokens}" for tokens, count in engine["cached_requests"].items() if count]
    assert run(llada, "--no-check").stdout.splitlines()[-6:] == [
        "",
        "LLM in this budget: steps of up to 12288 rows,"
        f" the largest {engine['largest_step_bytes'] / 2**20:.2f} MiB",
        f"KV pool: {engine['kv_pool_pages']} pages, {engine['kv_pool_bytes'] / GIB:.2f} GiB:"
        f" requests of so many tokens: {', '.join(held)} (cache dual)",
        "longest request with a cache (--max-context asks for more):"
        f" {engine['max_cached_context']} tokens {beyond}",
        f"longest context beside the pool: {engine['max_context']} tokens {beyond}",
        f"longest context once the pool is given up: {engine['max_context_without_pool']} tokens {beyond}",
    ]


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


def test_the_compilers_word(llada: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def compiler_temp_bytes(workload: Any, plan: Any, target: str) -> int:
        asked.append((workload.config.hidden_size, workload.device.hopper, plan.context, target))
        return plan.activation.peak_bytes - GIB

    monkeypatch.setattr("jdllm.cli.plan_report.compiler_temp_bytes", compiler_temp_bytes)
    quiet = facts(llada, "--target", "a100-80gb")
    assert (asked, quiet["compiler_peak_bytes"]) == ([], None)
    got = facts(llada, "--target", "a100-80gb", "--check")
    assert asked == [(4096, False, 32768, "a100-80gb")]
    assert got["compiler_peak_bytes"] == got["peak_bytes"] - GIB
    lines = run(llada, "--target", "a100-80gb").stdout.splitlines()
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
