"""A step of requests that control logits, compiled for an H200 without one: no further logits."""

import dataclasses

import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.chunks import ChunkConfig
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.models.weights import abstract_params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for
from tests.engines import generation_request, pack_all

pytestmark = pytest.mark.aot

MIB = 2**20
HEAD_ROWS = 128


def temporaries(sampling: SamplingParams) -> int:
    config = dataclasses.replace(SHAPES["llada-8b"], num_layers=2)
    request = generation_request(0, np.arange(256 - HEAD_ROWS), sampling, config)
    step = compile_for(
        "h200",
        denoise,
        abstract_params(config, "bfloat16"),
        pack_all([request], config).batch,
        np.int32(1),
        config=config,
        mask_id=config.mask_id,
        chunks=ChunkConfig(),
        level=Level.FILTERED,
    )
    memory = step.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_controls_take_no_further_logits():
    free = SamplingParams(gen_length=HEAD_ROWS)
    asked = free.changed(allowed_token_ids=(5,), logit_bias={5: 1.0}, min_tokens=8)
    logits = 4 * HEAD_ROWS * SHAPES["llada-8b"].vocab_size
    assert logits > 32 * MIB
    # Of each head row a bit for each id, and the numbers of some ids.
    assert temporaries(asked) - temporaries(free) < logits / 32 + 8 * MIB
