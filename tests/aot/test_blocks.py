"""A block model compiled for an H200: finished blocks fill the pool in place, also inside of pages."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.decoding.blocks import store_and_step, store_blocks
from jdllm.decoding.causal import prefill
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for
from jdllm.planning.ladder import Entry
from jdllm.serving.blocks.packing import Form, pack_blocks, with_choices, with_steps
from jdllm.serving.blocks.request import BlockRequest, block_spec
from jdllm.serving.pool.kv_pool import KvPool

pytestmark = pytest.mark.aot

CONFIG = dataclasses.replace(
    CAUSAL_SHAPES["llama-3.1-8b"], attention="block_causal", block_length=32, mask_id=0
)
PAGES, COUNT, MIB = 4096, 32, 2**20


def asked(config: ModelConfig) -> tuple[list[BlockRequest], list[range], KvPool]:
    """Blocks that begin inside of a page, behind a thousand stored rows."""
    pool, sampling = KvPool(config, "bfloat16", PAGES), SamplingParams(gen_length=64)
    requests = [BlockRequest(block_spec(np.arange(1, 1057), sampling, config), i) for i in range(COUNT)]
    for request in requests:
        pool.admit(request)
    return requests, [range(1024 + 32 * (i % 2), 1056 + 32 * (i % 2)) for i in range(COUNT)], pool


@pytest.mark.parametrize(
    ("shifted", "tile_rows", "steps"),
    [(False, 32, False), (False, 32, True), (False, 8, True), (False, None, False), (True, 32, False)],
)
def test_blocks_are_stored_in_place(shifted: bool, tile_rows: int | None, steps: bool):
    config = dataclasses.replace(CONFIG, logits_shift=shifted)
    requests, parts, pool = asked(config)
    entry = Entry(2048 if steps else 1024, COUNT * COUNT, COUNT, 1)
    packed = pack_blocks(
        requests, parts, config, pool.book, entry, Form(tile_rows, entries=8192), steps=steps
    )
    static: dict[str, Any] = {"config": config}
    function, arguments = store_blocks, packed.arguments
    if shifted:
        function, static["level"] = prefill, Level.TOP
        arguments = with_choices(packed, requests, parts, config, entry).arguments
    if steps:
        function = store_and_step
        static |= {"mask_id": config.mask_id, "logits_chunks": 1, "level": Level.TOP}
        arguments = with_steps(packed, requests, config, entry).arguments
    params = abstract_params(config, "bfloat16")
    executable: Any = compile_for(
        "h200", function, params, *arguments, pool.abstract, donate=("pool",), **static
    )
    memory = executable.memory_analysis()
    pool_bytes = 2 * config.num_layers * PAGES * PAGE_ROWS * config.num_kv_heads * config.head_dim * 2
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 1024 * MIB, memory.temp_size_in_bytes / MIB
    # The compiler tries a sum over a layer's weights on a copy of all layers, for which there is no room.
    stacked = re.compile(rf"bf16\[{config.num_layers},\d{{4,}},\d+\]\S* parameter")
    for computation in re.findall(r"\n%fused[^\n]*\{\n((?:  .*\n)*)", executable.as_text()):
        assert not (stacked.search(computation) and " reduce(" in computation), computation
