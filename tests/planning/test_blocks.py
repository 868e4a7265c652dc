"""Plans of block models: what an engine takes, and what the command line says."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.shapes import BLOCK_SHAPES
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import CPU, HOPPER
from jdllm.planning.account import Account, make_account
from jdllm.planning.blocks import BlocksPlan, plan_blocks
from jdllm.planning.budget import Budget
from jdllm.planning.plan import Workload
from jdllm.serving.blocks.request import block_spec
from jdllm.serving.build import make_engine
from tests.helpers import Golden
from tests.planning.plan_command import assert_mistake, invoke

MIB, GIB = 2**20, 2**30
BLOCK = 4
CONFIG = dataclasses.replace(config_from_hf(Golden("sdar").directory), block_length=BLOCK, mask_id=319)


def account_of(config: ModelConfig) -> Account:
    return make_account(config, "float32", Budget(1200 * MIB), device=CPU, max_num_batched_tokens=256)


def planned(prompt: int | None, config: ModelConfig = CONFIG) -> BlocksPlan:
    return plan_blocks(Workload(config, "float32", device=CPU), account_of(config), "h200", prompt)


def test_the_longest_prompt_is_the_engines():
    config = dataclasses.replace(CONFIG, max_positions=1 << 30)
    account, longest = account_of(config), planned(None, config).longest
    engine = make_engine(abstract_params(config, "float32"), config, Executables("cpu"), account)
    assert planned(None, config).prompt == longest
    assert planned(longest, config).fits
    assert not planned(longest + 1, config).fits
    one = SamplingParams(gen_length=BLOCK)
    specs = [block_spec(np.ones(length, np.int32), one, config) for length in (longest, longest + 1)]
    lives = [engine.parts.costs.life(spec).pages for spec in specs]
    assert lives == [engine.pool.pages, engine.pool.pages + 1]


def test_the_longest_prompt_has_positions():
    assert planned(None).prompt == CONFIG.max_positions - BLOCK


def test_parts_and_times():
    plan = planned(1000)
    assert (plan.parts, plan.rows, plan.block_length) == (6, 192, BLOCK)
    assert plan.peak_bytes <= 1200 * MIB
    stored = 2 * 4 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
    assert planned(1064).evaluation_bytes - plan.evaluation_bytes == 64 * stored
    assert plan.evaluation_seconds == plan.evaluation_bytes / 4.3e12


def test_few_experts_are_read():
    """LLaDA2.0-mini: blocks of 32 touch about 163 of 256 experts of each of 19 layers, of 6 MiB each."""
    config = BLOCK_SHAPES["llada2-mini"]
    account = make_account(config, "bfloat16", Budget(80 * GIB), device=HOPPER, max_num_batched_tokens=8192)
    plan = plan_blocks(Workload(config, "bfloat16", device=HOPPER), account, "h200", 1024)
    assert plan.evaluation_bytes == pytest.approx(19 * 163 * 6 * MIB, rel=0.1)
    assert plan.evaluation_bytes < account.weights


def test_the_command_says_how_fast_blocks_follow():
    options = ("--target", "h200", "--memory", "1200MiB", "--context", "2000", "--dtype", "float32")
    asked = invoke(Golden("sdar").directory, *options, "--json", "--max-num-batched-tokens", "256")
    assert asked.exit_code == 0, asked.output
    facts = json.loads(asked.stdout)
    assert (facts["prompt"], facts["fits"], facts["parts"]) == (2000, True, 11)
    said = invoke(Golden("sdar").directory, *options).stdout
    assert "2000 tokens of prompt fit on h200" in said
    assert f"an evaluation of a block of {BLOCK} behind it reads" in said
    beyond = invoke(Golden("sdar").directory, *options, "--context", "100000000")
    assert (beyond.exit_code, "the longest that does has" in beyond.output) == (3, True)


def test_prefilling_is_refused():
    asked = invoke(Golden("sdar").directory, "--context", "2000", "--memory", "1GiB", "--prefilling", "dream")
    assert_mistake(asked, "--prefilling", "a block model")


@pytest.mark.parametrize("devices", [1, 2])
def test_an_adapter_for_drafts_takes_its_bytes(devices: int):
    """Of rank 4 on three layers with 64 inputs, of which each card has a part, and 64 outputs, in float32."""
    options = ("--target", "h200", "--memory", "1GiB", "--context", "64", "--kv-pool", "1MiB")
    options = (*options, "--devices", str(devices), "--max-num-batched-tokens", "256")
    asked = [
        invoke(Golden("nemotron_labs_diffusion").directory, *options, *plain, "--json")
        for plain in ((), ("--plain-drafts",))
    ]
    beside, alone = (json.loads(one.stdout) for one in asked)
    size = 3 * 4 * (64 // devices + 64) * 4
    assert (beside["adapter_bytes"], alone["adapter_bytes"]) == (size, 0)
    assert beside["peak_bytes"] == alone["peak_bytes"] + size
    table = invoke(Golden("nemotron_labs_diffusion").directory, *options).stdout.splitlines()
    assert [line.split() for line in table if line.startswith("adapter")] == [
        ["adapter", f"{size / 1024:.2f}", "KiB"]
    ]
