"""A block model compiled for an H200: finished blocks fill the pool in place, also inside of pages."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.shapes import BLOCK_SHAPES, CAUSAL_SHAPES
from jdllm.decoding.blocks import store_and_step, store_blocks
from jdllm.decoding.causal import prefill
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.unseen import Unseen
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for
from jdllm.planning.ladder import Entry
from jdllm.planning.plan import UNLIMITED, Bucket, Workload, plan_bucket
from jdllm.serving.ahead import later
from jdllm.serving.blocks.packing import Form, pack_blocks, with_choices
from jdllm.serving.blocks.request import BlockRequest, block_spec
from jdllm.serving.blocks.step_packing import pack_steps
from jdllm.serving.denoise.cached_runner import LEVELS
from jdllm.serving.launch import Launch
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.request import of_class
from tests.aot.chains import chain_of

pytestmark = pytest.mark.aot

CONFIG = dataclasses.replace(
    CAUSAL_SHAPES["llama-3.1-8b"], attention="block_causal", block_length=32, mask_id=0
)
PAGES, COUNT, MIB = 4096, 32, 2**20
STEP_STATIC = {"mask_id": CONFIG.mask_id, "logits_chunks": 1, "level": LEVELS[0]}


def asked(config: ModelConfig) -> tuple[list[BlockRequest], list[range], KvPool]:
    """Blocks that begin inside of a page, behind a thousand stored rows."""
    pool, sampling = KvPool(config, "bfloat16", PAGES), SamplingParams(gen_length=64)
    requests = [BlockRequest(block_spec(np.arange(1, 1057), sampling, config), i) for i in range(COUNT)]
    for request in requests:
        pool.admit(request)
    return requests, [range(1024 + 32 * (i % 2), 1056 + 32 * (i % 2)) for i in range(COUNT)], pool


@pytest.mark.parametrize(("shifted", "tile_rows"), [(False, 32), (False, None), (True, 32)])
def test_blocks_are_stored_in_place(shifted: bool, tile_rows: int | None):
    config = dataclasses.replace(CONFIG, logits_shift=shifted)
    requests, parts, pool = asked(config)
    entry = Entry(1024, COUNT * COUNT, COUNT, 1)
    packed = pack_blocks(requests, parts, config, pool.book, entry, Form(tile_rows, entries=8192))
    static: dict[str, Any] = {"config": config}
    function, arguments = store_blocks, packed.arguments
    if shifted:
        function, static["level"] = prefill, Level.TOP
        arguments = with_choices(packed, requests, parts, config, entry).arguments
    check_in_place(config, function, arguments, pool, static)


@pytest.mark.parametrize(("count", "tile_rows"), [(COUNT, 32), (COUNT, 8), (COUNT, 4), (1, 32)])
def test_blocks_are_stored_in_place_with_a_step(count: int, tile_rows: int):
    """Of one request the layers are a chain, in which nothing stands between two kernels."""
    config = dataclasses.replace(CONFIG, qk_norm=True)
    requests, _, pool = asked(config)
    for request in requests:
        request.find(1024)
    entry = Entry(2 * 32 * count, 32 * count, max(count, 8), 1)
    candidates = [request.candidates() for request in requests[:count]]
    packed = pack_steps(requests[:count], candidates, config, pool.book, entry, 16384, tile_rows)
    static = STEP_STATIC | {"config": config, "chained": count == 1}
    left: Any = jax.ShapeDtypeStruct((entry.head_rows,), np.int32)
    arguments = *packed.arguments, Unseen(left, left, packed.source)
    text = check_in_place(config, store_and_step, arguments, pool, static)
    if count == 1:
        chain = chain_of(text)
        assert (chain.of_layers, chain.between, chain.constants) == (9 * config.num_layers, [], set())


@pytest.mark.parametrize("count", [1, COUNT])
def test_blocks_are_entered_ahead_within_the_plan_of_a_step(count: int):
    """Each request has rows of a block whose tokens the host has not seen, and of the next block. An engine
    has room for a sixteenth more than the plan."""
    entered_ahead(BLOCK_SHAPES["sdar-8b"], count, PAGES)


def entered_ahead(config: ModelConfig, count: int, pages: int) -> str:
    """Compile the evaluation of so many requests that enter their blocks ahead, and return its text."""
    requests, pool = ahead(config, count, pages)
    entry = Entry(2 * 32 * count, 32 * count, max(count, 8), 1)
    candidates = [request.candidates() for request in requests]
    packed = pack_steps(requests, candidates, config, pool.book, entry, 16384, 8)
    assert np.count_nonzero(packed.source >= 0) == 32 * count
    static = STEP_STATIC | {"config": config, "mask_id": config.mask_id, "chained": count == 1}
    left: Any = jax.ShapeDtypeStruct((2048,), np.int32)
    arguments = *packed.arguments, Unseen(left, left, packed.source)
    plan = plan_bucket(Workload(config), Bucket(entry.rows, entry.rows, entry.head_rows), UNLIMITED)
    most = plan.activation.peak_bytes * 17 // 16
    return check_in_place(config, store_and_step, arguments, pool, static, most)


def test_a_pool_that_fills_the_card_costs_no_product():
    """XLA counts the pool once for each write, and would save memory by computing products twice."""
    config = dataclasses.replace(BLOCK_SHAPES["sdar-8b"], num_layers=8)
    products = re.compile(r'custom_call_target="__cublas')
    few, many = (entered_ahead(config, COUNT, pages) for pages in (PAGES, 10 * PAGES))
    assert len(products.findall(few)) == len(products.findall(many)) > 0


def ahead(config: ModelConfig, count: int, pages: int) -> tuple[list[BlockRequest], KvPool]:
    """Requests as they will be behind a step that ends a block of each, with a thousand stored rows."""
    pool = KvPool(config, "bfloat16", pages)
    sampling = SamplingParams(gen_length=64, block_length=32, steps=2)
    requests = [BlockRequest(block_spec(np.arange(1, 1057), sampling, config), i) for i in range(count)]
    for request in requests:
        pool.admit(request)
        request.find(request.known)
    asked = [request.candidates() for request in requests]
    step = Launch(lambda: None, asked, [None] * count, left_at=range(0, 32 * count, 32))
    entered = [later(request, step, i) for i, request in enumerate(requests)]
    return of_class(BlockRequest, [request for request in entered if request is not None]), pool


def check_in_place(
    config: ModelConfig,
    function: Any,
    arguments: tuple[Any, ...],
    pool: KvPool,
    static: dict[str, Any],
    most: int = 1024 * MIB,
) -> str:
    """Compile a part that fills the pool and takes `most` bytes besides, and return its text."""
    params = abstract_params(config, "bfloat16")
    executable: Any = compile_for(
        "h200", function, params, *arguments, pool.abstract, donate=("pool",), **static
    )
    memory, text = executable.memory_analysis(), executable.as_text()
    pool_bytes = sum(array.size * array.dtype.itemsize for array in pool.abstract)
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < most, (memory.temp_size_in_bytes / MIB, most / MIB)
    # The compiler tries a sum over a layer's weights on a copy of all layers, for which there is no room.
    stacked = re.compile(rf"bf16\[{config.num_layers},\d{{4,}},\d+\]\S* parameter")
    for computation in re.findall(r"\n%fused[^\n]*\{\n((?:  .*\n)*)", text):
        assert not (stacked.search(computation) and " reduce(" in computation), computation
    return text
