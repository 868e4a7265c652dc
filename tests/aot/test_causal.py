"""Llama-3.1-8B compiled for an H200: prompts fill the pool in place, and decodes write their rows into it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.decoding.causal import decode, prefill
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import HOPPER
from jdllm.pallas.masked_logits import Level
from jdllm.planning.account import make_account
from jdllm.planning.aot import compile_for
from jdllm.planning.budget import Budget
from jdllm.planning.ladder import Entry
from jdllm.serving.causal.packing import pack_prompts, pack_sequences
from jdllm.serving.causal.request import CausalRequest, causal_spec
from jdllm.serving.pool.kv_pool import KvPool
from tests.aot.chains import chain_of, spills_of

pytestmark = pytest.mark.aot

CONFIG = CAUSAL_SHAPES["llama-3.1-8b"]
PAGES = 4096  # half a GiB for the keys of a layer
MIB = 2**20
MOST_SPILLED = 160
"""Bytes of a thread, once for each tile of ids, where the head changes logits by penalties."""


def asked(
    length: int, count: int, config: ModelConfig, penalty: float = 1.0
) -> tuple[list[CausalRequest], KvPool]:
    pool, sampling = (
        KvPool(config, "bfloat16", PAGES),
        SamplingParams(max_tokens=64, repetition_penalty=penalty),
    )
    requests = [CausalRequest(causal_spec(np.arange(length), sampling, config), i) for i in range(count)]
    for request in requests:
        pool.admit(request)
    return requests, pool


def compiled(function: Any, arguments: tuple[Any, ...], config: ModelConfig) -> Any:
    params = abstract_params(config, "bfloat16")
    static = {"config": config, "level": Level.TOP, "chained": function is decode}
    return compile_for("h200", function, params, *arguments, donate=("pool",), **static)


def pool_bytes(config: ModelConfig) -> int:
    return 2 * config.num_layers * PAGES * PAGE_ROWS * config.num_kv_heads * config.head_dim * 2


@pytest.mark.parametrize(("rows", "stored"), [(8192, False), (8192, True), (512, True)])
def test_a_part_of_a_prompt_fills_pages_in_place(rows: int, stored: bool):
    """What it needs is planned, however long the prompt is."""
    requests, pool = asked(65536, 1, CONFIG)
    part = range(65536 - rows, 65536) if stored else range(rows)
    entry, entries = Entry(rows, 8, 8, 1), 1024 if stored else None
    packed = pack_prompts(requests, [part], CONFIG, pool.book, entry, entries)
    memory = compiled(prefill, (*packed.arguments, pool.abstract), CONFIG).memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes(CONFIG)
    account = make_account(CONFIG, "bfloat16", Budget(40 << 30), device=HOPPER, max_num_batched_tokens=rows)
    print(memory.temp_size_in_bytes / MIB, account.largest_step / MIB)
    assert memory.temp_size_in_bytes < account.largest_step * 17 / 16


@pytest.mark.parametrize(
    ("count", "window", "penalty"), [(8, None, 1.0), (32, None, 1.0), (32, None, 1.2), (32, 4096, 1.0)]
)
def test_decodes_write_rows_in_place(
    count: int,
    window: int | None,
    penalty: float,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """They run as a chain of kernels that keep to their registers; with a window pages are gathered."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    config = dataclasses.replace(CONFIG, sliding_window=window)
    requests, pool = asked(1024, count, config, penalty)
    for request in requests:
        request.computed = 1023
    entries = 2 * PAGES if window is None else 1024
    packed = pack_sequences(requests, config, pool.book, Entry(count, count, count, 16), entries)
    executable = compiled(decode, (*packed.arguments, np.int32(1), pool.abstract), config)
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes(config)
    assert memory.temp_size_in_bytes < (64 if window is None else 512) * MIB
    if window is None:
        printed = "".join(capfd.readouterr())
        spilled = max(int(count) for pair in spills_of(printed) for count in pair)
        assert spilled <= (MOST_SPILLED if penalty != 1 else 0), printed
        text = executable.as_text() or ""
        assert text.count(" while(") == 1, "a loop within a step waits for the host in every turn"
        chain = chain_of(text)
        assert chain.of_layers == 8 * config.num_layers
        assert not chain.between
        assert not chain.constants
