"""Self-speculation compiled for an H200: a draft reads the pool, and its verification fills it in place."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.speculation import speculate
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.adapter import DraftAdapter
from jdllm.models.weights import abstract_params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for
from jdllm.planning.ladder import Entry
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.speculation.packing import pack_drafts
from jdllm.serving.speculation.request import SpeculativeRequest, speculative_spec

pytestmark = pytest.mark.aot

CAUSAL = dataclasses.replace(CAUSAL_SHAPES["llama-3.1-8b"], mask_id=0)
ROPE = dataclasses.replace(CAUSAL.rope, query_beta=0.1, original_positions=16384)
CONFIG = dataclasses.replace(
    CAUSAL, attention="block_causal", block_length=32, causal_context=True, rope=ROPE
)
PAGES, RANK, MIB = 4096, 128, 2**20


@pytest.mark.parametrize("count", [1, 32])
def test_blocks_are_drafted_and_stored_in_place(count: int):
    """Blocks of a page each, that begin inside of it, behind a thousand stored rows."""
    pool, sampling = KvPool(CONFIG, "bfloat16", PAGES), SamplingParams(gen_length=64)
    specs = [speculative_spec(np.arange(1, 1057), sampling, CAUSAL, 32) for _ in range(count)]
    requests = [SpeculativeRequest(spec, i) for i, spec in enumerate(specs)]
    for request in requests:
        pool.admit(request)
        request.store(np.arange(0), request.known - 1)
    entry = Entry(32 * count, 32 * count, max(8, count), 16)
    packed = pack_drafts(requests, CONFIG, 0, pool.book, entry, 8192)
    shapes = (RANK, 4096), (4096, RANK)
    down, up = (jax.ShapeDtypeStruct((CONFIG.num_layers, *shape), "bfloat16") for shape in shapes)
    adapter: Any = DraftAdapter(down, up)  # type: ignore[arg-type]  # nothing runs
    static: dict[str, Any] = {"config": CONFIG, "mask_id": 0, "logits_chunks": 1, "level": Level.TOP}
    params = abstract_params(CONFIG, "bfloat16")
    given = params, adapter, *packed.arguments, pool.abstract
    executable: Any = compile_for("h200", speculate, *given, donate=("pool",), **static)
    memory = executable.memory_analysis()
    pool_bytes = 2 * CONFIG.num_layers * PAGES * PAGE_ROWS * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 1024 * MIB, memory.temp_size_in_bytes / MIB
