"""Steps with layers in host memory, compiled for an H200: what arrives while something else is computed."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import temp_bytes
from jdllm.decoding.cached import refresh, reuse
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.execution.offload.placement import LAYERS_ON_DEVICE
from jdllm.models.weights import abstract_params
from jdllm.models.weights import layer_bytes as layer_weights
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for
from jdllm.serving.denoise.cached_packing import pack_refresh
from tests.aot.packing import packed_reuse
from tests.aot.test_cached import CONFIG, LEFT, LENGTH, MIB, REQUESTS, STATIC, abstract_pool, requests, unseen
from tests.engines import entry_of, generation_request, pack_all

pytestmark = pytest.mark.aot

ARRIVING = LAYERS_ON_DEVICE * layer_weights(CONFIG, "bfloat16", 0)


def with_host_layers(count: int) -> dict[str, Any]:
    """Static arguments, and the abstract weights, of LLaDA-8B with so many layers in host memory."""
    config = dataclasses.replace(CONFIG, offloaded=count)
    return STATIC | {"config": config}


def weights_of(static: dict[str, Any]) -> dict[str, Any]:
    return abstract_params(static["config"], "bfloat16")


def overlapped(text: str) -> int:
    """Matrix products of loops over layers that run while a weight arrives."""
    found = 0
    for body in text.split("\n\n"):
        arriving = set[str]()
        if body.startswith("ENTRY"):
            continue
        for line in body.splitlines():
            name, _, operation = line.strip().partition(" = ")
            if "S(5)" in operation and "fusion-start(" in operation:
                arriving.add(name)
            elif (done := re.search(r"fusion-done\((%[\w.-]+)\)", operation)) is not None:
                arriving.discard(done[1])
            found += bool(arriving) and "__cublas$" in operation
    return found


def refreshed(static: dict[str, Any]) -> Any:
    asked, pages = requests("dual")
    (batch, _), selection, table, _ = pack_refresh(asked, CONFIG, pages, entry_of(asked))
    arguments = (weights_of(static), batch, selection, table, abstract_pool(pages))
    return compile_for("h200", refresh, *arguments, donate=("pool",), scored=False, left=LEFT, **static)


@pytest.mark.parametrize("count", [CONFIG.num_layers, 20])
def test_a_layer_arrives_while_the_one_before_is_computed(count: int):
    found, whole = (refreshed(with_host_layers(layers)) for layers in (count, 0))
    assert temp_bytes(found) < temp_bytes(whole) + ARRIVING
    assert overlapped(found.as_text()) >= 4
    assert overlapped(whole.as_text()) == 0


def test_a_reuse_has_two_layers_at_most():
    static = with_host_layers(CONFIG.num_layers)
    asked, pages = requests("dual")
    (batch, _), table, source = packed_reuse(asked, pages, CONFIG)
    arguments = (weights_of(static), batch, table, abstract_pool(pages), unseen(source), np.int32(1))
    assert temp_bytes(compile_for("h200", reuse, *arguments, **static)) < ARRIVING + 64 * MIB


def test_a_step_in_chunks_has_one_layer_at_a_time():
    """Layers are unrolled there, and nothing but their order keeps them from arriving all at once."""
    chunks = ChunkConfig(ffn=4, query=4, kv=4)
    sampling = SamplingParams(gen_length=256, block_length=32)
    asked = [generation_request(i, np.arange(LENGTH - 256), sampling, CONFIG) for i in range(REQUESTS)]
    batch = pack_all(asked, CONFIG).batch

    def needed(count: int) -> int:
        static = with_host_layers(count)
        arguments = (weights_of(static), batch, np.int32(1))
        given = {"config": static["config"], "mask_id": CONFIG.mask_id, "chunks": chunks}
        return temp_bytes(compile_for("h200", denoise, *arguments, level=Level.TOP, **given))

    assert needed(CONFIG.num_layers) < needed(0) + ARRIVING
