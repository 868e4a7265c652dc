"""Steps that run on several cards at once generate what one card generates."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from jdllm import LLM, ConfigError
from jdllm.cli import app
from tests.helpers import ROOT, Golden, slow

CASES = "uncached,sparse,head_sparse"


def on_cards(family: str, cases: str, *counts: int) -> list[dict[str, Any]]:
    """What `tests/several_cards.py` tells, in a process that has eight devices."""
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.several_cards", family, cases, *map(str, counts)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("family", "cases", "counts"),
    [
        ("llada", CASES, (1, 2)),
        slow("llada", "all", (1, 4)),
        slow("dream", "all", (1, 2, 4)),
        slow("dream+qwen2", "adaptive,adaptive dual,adaptive and drawn", (1, 2, 4)),
        slow("llada_moe", CASES, (1, 4)),
        slow("llama", "all", (1, 2, 4)),
        slow("sdar", "all", (1, 4)),
        slow("demo", CASES, (1, 8)),
        slow("nemotron_labs_diffusion", "drafted", (1, 2)),
        slow("llama:fp8", "greedy", (1, 4)),
        slow("llada:fp8", "dual,head_sparse", (1, 2)),
    ],
)
def test_tokens_are_those_of_one_card(family: str, cases: str, counts: tuple[int, ...]):
    """In f32 sums in another order change the last bits of logits, and no token.

    Dream, Llama and SDAR have two key-value heads, so that two of four cards have the same one.
    """
    alone, *others = on_cards(family, cases, *counts)
    assert [alone["cards"], *(found["cards"] for found in others)] == list(counts)
    assert all(tokens for tokens in alone["tokens"].values())
    for found in others:
        assert (found["tokens"], found["evaluations"]) == (alone["tokens"], alone["evaluations"])
        np.testing.assert_allclose(found["logits"], alone["logits"], atol=1e-4, rtol=1e-4)
        # Norms and routers are on all cards, and cards have parts of the ids in whole units of 256.
        padded = -(-alone["ids"] // (256 * found["cards"])) * 256 * found["cards"] - alone["ids"]
        assert 1 <= (found["weights"] * found["cards"] - padded * alone["id_bytes"]) / alone["weights"] < 1.1


@pytest.mark.parametrize(
    ("family", "cases", "counts"),
    [
        ("llada", "long", (1, 2)),
        slow("llada", "all long", (1, 4)),
        slow("dream", "all long", (1, 4)),
        slow("llada_moe", "all long", (1, 2)),
        slow("demo", "long", (1, 8)),
    ],
)
def test_rows_that_cards_deal_out_have_the_tokens_of_one_card(
    family: str, cases: str, counts: tuple[int, ...]
):
    """Each of several cards then has its part of the layers, and all layers too."""
    alone, *others = on_cards(family, cases, *counts)
    assert all(tokens for tokens in alone["tokens"].values())
    for found in others:
        assert (found["tokens"], found["evaluations"]) == (alone["tokens"], alone["evaluations"])
        np.testing.assert_allclose(found["logits"], alone["logits"], atol=1e-4, rtol=1e-4)
        layers = alone["weights"] - alone["ids"] * alone["id_bytes"]
        assert found["weights"] > layers + alone["weights"] / found["cards"]


@pytest.mark.slow
def test_executables_for_several_cards_serve_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JDLLM_TEST_KEPT", str(tmp_path / "kept"))
    one, two, again = (on_cards("llada", "sparse", cards)[0] for cards in (1, 2, 2))
    assert (one["loaded"], two["loaded"], again["compiled"]) == (0, 0, 0)
    assert again["loaded"] == two["compiled"] == one["compiled"] > 1
    assert again["tokens"] == two["tokens"] == one["tokens"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 2}, ["devices is 2", "this machine has 1"]),
        ({"devices": 3}, ["num_heads is 4", "3 cards"]),
        ({"devices": 2, "host_memory": "1GiB"}, ["devices is 2", "host_memory"]),
        ({"devices": 0}, ["devices", "positive"]),
        ({"whole_layers": True}, ["whole_layers", "devices is 1"]),
    ],
)
def test_cards_that_cannot_share_a_model_are_refused(options: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as refused:
        LLM(Golden("llada").directory, cache_dir=None, progress=False, **options)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host-memory", "1GiB"], ["devices is 2", "--host-memory"]),
        (["--check"], ["--check", "--devices"]),
    ],
)
def test_a_plan_refuses_what_generating_would(options: list[str], words: list[str]):
    asked = ["plan", "--devices", "2", "--memory", "1GiB", "--target", "h200", *options]
    result = CliRunner().invoke(app, [*asked, str(Golden("llada").directory)])
    assert result.exit_code == 2
    assert all(word in result.output for word in words)


def test_a_plan_is_of_what_each_card_has():
    """Five norms of 64 numbers are on both cards; of everything else each has half."""
    plans = []
    for devices in ("1", "2"):
        options = ["--devices", devices, "--memory", "1GiB", "--target", "h200", "--json"]
        result = CliRunner().invoke(app, ["plan", *options, str(Golden("llada").directory)])
        plans.append(json.loads(result.stdout))
    alone, shared = (plan["weights_bytes"] for plan in plans)
    norms = 5 * 64 * 4
    assert shared == (alone - norms) // 2 + norms
    assert plans[1]["host_budget_bytes"] == 0
