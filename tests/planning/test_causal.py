"""Plans of causal models: what an engine takes, and what the command line says."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import Result

from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.cli.plan_causal import describe_causal
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import CPU, HOPPER
from jdllm.planning.account import make_account
from jdllm.planning.budget import Budget
from jdllm.planning.causal import CausalPlan, plan_causal
from jdllm.planning.plan import Workload
from jdllm.planning.step_time import step_flops
from jdllm.serving.build import make_engine
from jdllm.serving.causal.request import causal_spec
from tests.helpers import Golden
from tests.planning.plan_command import invoke

MIB, GIB = 2**20, 2**30
CONFIG = config_from_hf(Golden("llama").directory)
ACCOUNT = make_account(CONFIG, "float32", Budget(1200 * MIB), device=CPU, max_num_batched_tokens=256)


def planned(prompt: int | None) -> CausalPlan:
    return plan_causal(Workload(CONFIG, "float32", device=CPU), ACCOUNT, "h200", prompt)


def test_the_longest_prompt_is_the_engines():
    engine = make_engine(abstract_params(CONFIG, "float32"), CONFIG, Executables("cpu"), ACCOUNT)
    longest, one = planned(None).longest, SamplingParams(max_tokens=1)
    assert planned(longest).fits
    specs = [causal_spec(np.ones(length, np.int32), one, CONFIG) for length in (longest, longest + 1)]
    assert [engine.parts.costs.life(spec).pages > 0 for spec in specs] == [True, False]
    assert not planned(longest + 1).fits


def test_parts_and_times():
    plan = planned(1000)
    assert (plan.parts, plan.rows) == (6, 192)
    assert 0 < plan.token_seconds < planned(None).token_seconds
    assert plan.prefill_seconds >= 6 * plan.token_seconds / 2
    assert plan.peak_bytes <= 1200 * MIB


def test_beyond_the_pool_keys_are_in_host_memory():
    """The last layers' keys stay, as far as there is room; others pass through the device for each token."""
    budget = Budget(24 * GIB, host=64 * GIB)
    config = CAUSAL_SHAPES["llama-3.1-8b"]
    account = make_account(config, "bfloat16", budget, device=HOPPER, max_num_batched_tokens=8192)
    workload = Workload(config, "bfloat16", device=HOPPER)
    longest = plan_causal(workload, account, "h200", None)
    assert longest.layered is not None
    assert longest.prompt == longest.longest_layered > longest.longest
    assert longest.peak_bytes <= 24 * GIB
    assert 0 < longest.host_bytes <= 64 * GIB
    assert longest.transfer_seconds == longest.layered.streamed_bytes / 51e9
    assert not plan_causal(workload, account, "h200", longest.prompt + 1).fits
    said = describe_causal(workload, account, "h200", longest)
    assert "pass through the device for each" in said
    assert "host memory" in said


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, range(1, 37)),
        ({"attention": "block_causal", "block_length": 4}, [4 * (row // 4 + 1) for row in range(36)]),
    ],
)
def test_attention_in_order_is_counted_once(changes, ends):
    """Against the sum over rows of what each sees."""
    config, rows, heads = dataclasses.replace(CONFIG, **changes), 36, CONFIG.num_heads * CONFIG.head_dim
    attention = sum(2 * 2 * seen * heads for seen in ends) * CONFIG.num_layers
    matrices = 2 * heads + 2 * CONFIG.num_kv_heads * CONFIG.head_dim + 3 * CONFIG.intermediate_size
    products = 2 * rows * CONFIG.num_layers * CONFIG.hidden_size * matrices
    head = 2 * CONFIG.hidden_size * CONFIG.vocab_size
    assert step_flops(config, rows, 1) == attention + products + head


def run(*options: str) -> Result:
    return invoke(Golden("llama").directory, "--target", "h200", "--memory", "1200MiB", *options)


def test_the_command_says_how_fast_tokens_follow():
    told = run("--context", "2000", "--json", "--max-num-batched-tokens", "256", "--dtype", "float32")
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert (facts["prompt"], facts["fits"], facts["parts"]) == (2000, True, 11)
    said = run("--context", "2000").stdout
    assert "2000 tokens of prompt fit on h200" in said
    assert "longest prompt" in said


def test_a_prompt_that_does_not_fit_ends_with_3():
    told = run("--context", "100000000")
    assert told.exit_code == 3
    assert "the longest that does has" in told.output


def test_prefilling_is_refused():
    told = run("--context", "2000", "--prefilling", "dream")
    assert told.exit_code == 2
