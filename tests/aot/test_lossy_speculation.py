"""Lossy self-speculation compiled for an H200: drafts and verifications read the pool where it lies."""

from typing import Any

import numpy as np
import pytest

from benchmarks.shapes import BLOCK_SHAPES
from jdllm.decoding.lossy_speculation import draft_and_verify
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.weights import abstract_params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for
from jdllm.planning.ladder import Entry
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.speculation.lossy_packing import pack_rounds
from jdllm.serving.speculation.lossy_request import LossyRequest, lossy_spec

pytestmark = pytest.mark.aot

CONFIG = BLOCK_SHAPES["sdar-8b"]
PAGES, TILE_ROWS, MIB = 16384, 8, 2**20


@pytest.mark.parametrize("causal", [False, True])
def test_the_pool_is_not_copied(causal: bool):
    """32 blocks behind a thousand stored rows; a pool of several gigabytes."""
    pool = KvPool(CONFIG, "bfloat16", PAGES)
    sampling = SamplingParams(gen_length=64, transfer="lossy_speculation", causal_rows=causal)
    specs = [lossy_spec(np.arange(1, 1057), sampling, CONFIG) for _ in range(32)]
    requests = [LossyRequest(spec, i) for i, spec in enumerate(specs)]
    for request in requests:
        pool.admit(request)
        request.find(request.known)
    entry = Entry(TILE_ROWS * 32, 128, 32, 16)
    packed = pack_rounds(requests, CONFIG, pool.book, entry, 8192, TILE_ROWS)
    static: dict[str, Any] = {"config": CONFIG, "mask_id": CONFIG.mask_id, "logits_chunks": 1}
    static |= {"level": Level.FILTERED, "causal": causal}
    given = abstract_params(CONFIG, "bfloat16"), *packed.arguments, pool.abstract
    executable: Any = compile_for("h200", draft_and_verify, *given, **static)
    memory = executable.memory_analysis()
    assert memory.argument_size_in_bytes > 8192 * MIB
    assert memory.temp_size_in_bytes < 1024 * MIB, memory.temp_size_in_bytes / MIB
