"""The steps of LLaDA-8B and of Dream-7B, whose projections have a bias, compiled for an H200 without one."""

import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.chunks import ChunkConfig
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params, param_bytes
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for
from tests.engines import generation_request, pack_all

pytestmark = pytest.mark.aot

MIB = 2**20
ROWS = 512  # no activation is as large as the weight of the queries


class Step(NamedTuple):
    config: ModelConfig
    executable: jax.stages.Compiled


@pytest.fixture(scope="module", params=["llada-8b", "dream-7b"])
def step(request: pytest.FixtureRequest) -> Step:
    """One step with a block of 32 masked rows."""
    config = SHAPES[request.param]
    sampling = SamplingParams(gen_length=32)
    batch = pack_all([generation_request(0, np.arange(ROWS - 32), sampling, config)], config).batch
    executable = compile_for(
        "h200",
        denoise,
        abstract_params(config, "bfloat16"),
        batch,
        np.int32(1),
        config=config,
        mask_id=config.mask_id,
        chunks=ChunkConfig(),
        level=Level.TOP,
    )
    return Step(config, executable)


def memory(step: Step) -> Any:
    return step.executable.memory_analysis()


def test_arguments_are_the_weights(step: Step):
    weights = param_bytes(step.config, "bfloat16")
    assert weights < memory(step).argument_size_in_bytes < weights + MIB


def test_temporaries_have_no_room_for_a_weight(step: Step):
    gate_up_product = 3 * ROWS * step.config.intermediate_size * 2
    weight = step.config.intermediate_size * step.config.hidden_size * 2
    assert memory(step).temp_size_in_bytes < gate_up_product + weight


def test_no_operator_writes_a_weight(step: Step):
    """No result outside a fusion is as large as a layer's weight, but for slices that are read in place."""
    smallest_weight = step.config.hidden_size**2
    for line in _entry_and_loop_lines(str(step.executable.as_text())):
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
