"""The LLaDA-8B step compiled for an H200, without one."""

import math
import re

import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.models.weights import abstract_params, param_bytes
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for
from jdllm.planning.chunks import ChunkConfig
from jdllm.serving.packing import pack
from jdllm.serving.request import generation_request

pytestmark = pytest.mark.aot

CONFIG = SHAPES["llada-8b"]
MIB = 2**20


@pytest.fixture(scope="module")
def executable():
    """One step of 1024 rows, a block of 32 of them masked."""
    sampling = SamplingParams(gen_length=32)
    batch = pack([generation_request(0, np.arange(992), sampling, CONFIG)], CONFIG).batch
    return compile_for(
        "h200",
        denoise,
        abstract_params(CONFIG, "bfloat16"),
        batch,
        np.int32(1),
        config=CONFIG,
        mask_id=CONFIG.mask_id,
        chunks=ChunkConfig(),
        level=Level.TOP,
    )


def test_arguments_are_the_weights(executable):
    arguments = executable.memory_analysis().argument_size_in_bytes
    weights = param_bytes(CONFIG, "bfloat16")
    assert weights < arguments < weights + MIB


def test_temporaries_have_no_room_for_a_weight(executable):
    gate_up_product = 3 * 1024 * CONFIG.intermediate_size * 2
    weight = CONFIG.intermediate_size * CONFIG.hidden_size * 2
    assert executable.memory_analysis().temp_size_in_bytes < gate_up_product + weight


def test_no_operator_writes_a_weight(executable):
    """No result outside a fusion is as large as a layer's weight, but for slices that are read in place."""
    smallest_weight = 4096 * 4096
    for line in _entry_and_loop_lines(executable.as_text()):
        match = re.search(r"= bf16\[([\d,]+)\]\S* (\w[\w-]*)\(", line)
        if match is None or match[2] in ("get-tuple-element", "parameter", "bitcast"):
            continue
        elements = math.prod(int(n) for n in match[1].split(","))
        assert elements < smallest_weight, line


def _entry_and_loop_lines(text: str) -> list[str]:
    """Lines of computations that run as they stand, not of those inlined into a fusion."""
    fused = set(re.findall(r"(?:calls|to_apply)=%([\w.-]+)", text))
    lines, name = [], ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
        elif name not in fused:
            lines.append(line)
    return lines
