"""Estimated times of steps, against steps that were measured and against arithmetic."""

import dataclasses

import numpy as np
import pytest

from benchmarks.shapes import BLOCK_SHAPES, CAUSAL_SHAPES, SHAPES
from jdllm.decoding.prefilling import PRESETS
from jdllm.execution.offload.tiers import HostTiers
from jdllm.pallas.device import HOPPER
from jdllm.planning.account import make_account
from jdllm.planning.budget import Budget
from jdllm.planning.causal import CausalPlan, plan_causal
from jdllm.planning.descriptions import described_targets
from jdllm.planning.plan import Workload, plan_memory
from jdllm.planning.prefilling import Question, plan_stages
from jdllm.planning.step_time import (
    RATES,
    Rates,
    evaluation_bytes,
    evaluation_seconds,
    format_seconds,
    step_time,
    weights_read,
)

GIB = 2**30
LLADA = Workload(SHAPES["llada-8b"])


def estimate(context: int, target: str = "h200", workload: Workload = LLADA, gib: int = 100):
    return step_time(workload, plan_memory(workload, context, Budget(gib * GIB)), target)


@pytest.mark.parametrize(
    ("context", "measured", "error"), [(4096, 0.104, 0.05), (16384, 0.584, 0.05), (400_000, 158.0, 0.15)]
)
def test_what_an_h200_took(context: int, measured: float, error: float):
    assert estimate(context).seconds == pytest.approx(measured, rel=error)


@pytest.mark.parametrize(("context", "measured"), [(8192, 0.205), (32768, 1.153), (131072, 10.13)])
def test_what_a_prompt_took_on_an_h100(context: int, measured: float):
    plan = causal_plan(context, "h100")
    assert plan.prefill_seconds == pytest.approx(measured, rel=0.05)
    assert plan.prefill_measured
    assert not causal_plan(context, "b200").prefill_measured


@pytest.mark.parametrize(("context", "measured"), [(4096, 0.0069), (131072, 0.0157), (262144, 0.0213)])
def test_what_a_token_took_on_an_h100(context: int, measured: float):
    """In a dispatch of its own."""
    plan = causal_plan(context, "h100")
    assert plan.token_seconds == pytest.approx(measured, rel=0.08)
    assert plan.token_measured
    assert not causal_plan(context, "h200").token_measured


def causal_plan(prompt: int, target: str) -> CausalPlan:
    config = CAUSAL_SHAPES["llama-3.1-8b"]
    account = make_account(config, "bfloat16", Budget(72 * GIB), device=HOPPER)
    return plan_causal(Workload(config), account, target, prompt)


@pytest.mark.parametrize(("context", "measured"), [(32768, 1.097), (131072, 3.48)])
def test_what_a_question_over_a_long_context_took_on_an_h100(context: int, measured: float):
    workload = Workload(SHAPES["dream-7b"])
    account = make_account(workload.config, "bfloat16", Budget(60 * GIB), device=HOPPER)
    stages = plan_stages(workload, account, "h100", PRESETS["dream"], Question(context))
    assert sum(stage.seconds for stage in stages) == pytest.approx(measured, rel=0.15)


def test_other_cards_are_said_to_be_at_data_sheet_rate():
    ours, a100, l40s = (estimate(16384, target) for target in ("h200", "a100-80gb", "l40s"))
    assert a100.seconds / ours.seconds == pytest.approx(650 / 312)
    assert l40s.seconds / ours.seconds == pytest.approx(650 / 362)
    assert str(ours).endswith(" ms (estimate at the measured rate, 650 TFLOP/s)")
    assert str(ours).startswith("about ")
    assert str(a100).endswith(" s (estimate at the data-sheet rate, 312 TFLOP/s)")
    assert str(a100).startswith("at least ")
    full = estimate(16384, workload=dataclasses.replace(LLADA, dtype="float32"))
    assert full.seconds / ours.seconds == pytest.approx(650 / 67)
    assert not full.measured


def test_every_described_card_has_rates():
    assert sorted(RATES) == described_targets()
    assert [target for target, rates in RATES.items() if rates.measured] == ["h100", "h200"]


def test_no_step_is_faster_than_reading_the_weights():
    weights = 2 * 8.02e9
    assert estimate(1).seconds == pytest.approx(weights / RATES["h200"].bytes, rel=0.01)


def test_no_step_is_faster_than_its_transfers():
    """One row of queries against all keys and values, which pass through the device chunk after chunk."""
    tiers = HostTiers(chunk_rows=128, kv=True)
    plan = plan_memory(LLADA, 32768, Budget(16 * GIB), host_tiers=[tiers])
    assert plan.tiers == tiers
    keys_and_values = 32 * (32768 // 128) * 2 * 32768 * 4096 * 2
    assert step_time(LLADA, plan, "h200").seconds == pytest.approx(keys_and_values / 51e9, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0037, "3.7 ms"), (0.104, "104 ms"), (16.84, "16.8 s"), (158, "2.6 min"), (7200, "2.0 h")],
)
def test_times_in_words(seconds: float, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("shape", "tied"), [("dream-7b", False), ("llama-3.1-8b", True)])
def test_an_evaluation_reads_all_weights_but_an_embedding_that_is_no_head(shape: str, tied: bool):
    config = dataclasses.replace((SHAPES | CAUSAL_SHAPES)[shape], tied_head=tied)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * heads, config.num_kv_heads * heads
    biases = (q + 2 * kv) if config.qkv_bias else 0
    layer = hidden * (2 * q + 2 * kv + 3 * inner + 2) + biases
    numbers = config.num_layers * layer + hidden + config.vocab_size * hidden
    assert weights_read(config, "bfloat16", 32) == 2 * numbers


def test_an_evaluation_reads_the_experts_that_some_row_chooses():
    """Against draws."""
    config = SHAPES["llada-moe-7b"]
    moe, rng = config.moe, np.random.default_rng(0)
    assert moe is not None
    chosen = [
        len({expert for _ in range(2) for expert in rng.permutation(moe.experts)[: moe.top_k]})
        for _ in range(2000)
    ]
    one = 2 * config.num_layers * 3 * config.hidden_size * moe.expert_size
    unchosen = weights_read(config, "bfloat16", 10**6) - weights_read(config, "bfloat16", 2)
    assert unchosen == pytest.approx(one * (moe.experts - np.mean(chosen)), rel=0.01)


@pytest.mark.parametrize(("requests", "rows", "stored"), [(1, 1, 0), (1, 2, 1000), (3, 1.5, 64), (32, 4, 9)])
@pytest.mark.parametrize("slow", ["products", "memory"])
def test_an_evaluation_of_several_requests(requests: int, rows: float, stored: int, slow: str):
    """36 layers of 32 heads of 128 numbers, 8 of keys and values: the longer of two times counts."""
    config, q, kv = BLOCK_SHAPES["sdar-8b"], 32 * 128, 8 * 128
    together = round(requests * rows)
    per_row = 36 * (2 * 4096 * q + 2 * 4096 * kv + 3 * 4096 * 12288) + 4096 * 151936
    pairs = together * (together + 4) / 2 + together * stored
    flops = 2 * (together * per_row + 36 * 2 * pairs * q)
    read = weights_read(config, "bfloat16", together) + requests * stored * 2 * 36 * kv * 2
    assert evaluation_bytes(config, "bfloat16", together, requests * stored) == pytest.approx(read)
    rates = Rates(1.0, 0.5, 1e30, 1.0) if slow == "products" else Rates(1e30, 1e30, 1.0, 1.0)
    seconds = evaluation_seconds(config, "bfloat16", rates, requests, rows, stored)
    assert seconds == pytest.approx(flops if slow == "products" else read)
    if slow == "products":
        twice = evaluation_seconds(config, "float32", rates, requests, rows, stored)
        assert twice == pytest.approx(2 * flops)
