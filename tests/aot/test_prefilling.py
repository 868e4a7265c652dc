"""The stages of Dream-7B over a long context, compiled for an H200: what they hold and never copy."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.compiling.executables import Executables, temp_bytes
from jdllm.decoding.prefilling import PRESETS
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import HOPPER
from jdllm.planning.account import make_account
from jdllm.planning.aot import compile_for
from jdllm.prefilling.build import building
from jdllm.prefilling.layout import KeptChunk, Layout
from jdllm.prefilling.score import behind
from jdllm.serving.long.request import LongContext, LongRequest, long_spec
from jdllm.serving.long.score_stage import Score
from jdllm.serving.long.stages import Build, Draft, Model, Retain
from jdllm.serving.on_device import OnDevice
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.pool.stored_chunks import content_key

pytestmark = pytest.mark.aot

CONFIG = SHAPES["dream-7b"]
ROWS, PAGES = 8192, 16384
MIB = 2**20


class ForCard(Executables):
    """Compiles for a card that is not here, and runs nothing."""

    def __init__(self):
        super().__init__("cuda")
        self.made: dict[str, Any] = {}

    def compile(
        self,
        function: Any,
        *args: Any,
        donate: Any = (),
        chained: Any = False,
        tuned: Any = True,
        **static: Any,
    ):
        self.made[function.__name__] = compile_for("h200", function, *args, donate=donate, **static)
        return self.made[function.__name__]


@pytest.fixture(scope="module")
def model() -> Model:
    params = abstract_params(CONFIG, "bfloat16")
    account = make_account(CONFIG, "bfloat16", None, device=HOPPER, max_num_batched_tokens=ROWS)
    account = dataclasses.replace(account, pages=PAGES)
    executables = ForCard()
    pool = KvPool(CONFIG, "bfloat16", PAGES)
    return Model(OnDevice(params, CONFIG, executables, account, pool))


def request(preset: str) -> LongRequest:
    sampling = SamplingParams(gen_length=32, block_length=32, prefilling=preset)  # pyright: ignore
    ids = np.arange(16384, dtype=np.int32)
    long = LongContext(ids[:32], ids[:8192], ids[:64], ids[:64])
    return LongRequest(long_spec(long, sampling, CONFIG, 1))


def made(model: Model, name: str) -> Any:
    assert isinstance(model.executables, ForCard)
    return model.executables.made[name]


def layer_bytes() -> int:
    """Keys of one layer of the pool."""
    return PAGES * 64 * CONFIG.num_kv_heads * CONFIG.head_dim * 2


def test_scores_store_chunks_in_place_and_read_them_where_they_lie(model: Model):
    asked = request("dream")
    after = behind(asked.long_spec.long.scoring_query, np.arange(4), 0)
    keys = [content_key(str(i)) for i in range(9)]
    first = Score(model, asked, after, range(8), ROWS, keys)
    first.launch()
    memory = made(model, "score").memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * CONFIG.num_layers * layer_bytes()
    # A residual stream, a gate and its product, and queries of all rows; no second copy of them.
    rows = 8192 * 2
    assert (
        memory.temp_size_in_bytes < rows * (2 * CONFIG.intermediate_size + 8 * CONFIG.hidden_size) + 512 * MIB
    )
    again = Score(model, asked, after, range(4), ROWS, keys)
    again.launch()
    assert again.stored
    assert temp_bytes(made(model, "score")) < 512 * MIB < layer_bytes()


def test_a_build_writes_the_pool_in_place(model: Model):
    asked = request("dream")
    spec = asked.long_spec
    kept = tuple(KeptChunk(i, spec.chunks[i].tokens, np.arange(1024)) for i in range(4))
    asked.layout = Layout(PRESETS["dream"], spec.long.instruction, kept, spec.long.query, 32, 32)
    model.pool.admit(asked)
    (evaluation,) = building(asked.layout, spec.long.query, 0, shifted=True)
    Build(model, asked, evaluation).launch()
    compiled = made(model, "build")
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * CONFIG.num_layers * layer_bytes()
    assert temp_bytes(compiled) < 600 * MIB
    model.pool.release(asked)


def test_attention_of_whole_chunks_is_never_there(model: Model):
    asked = request("dream_sparse")
    Retain(model, asked, range(4), 4, np.arange(8, dtype=np.int32)).launch()
    assert temp_bytes(made(model, "retain")) < 700 * MIB  # 4 x 28 x 1064^2 probabilities alone were 507 MB


def test_a_draft_holds_little(model: Model):
    Draft(model, request("dream")).launch()
    assert temp_bytes(made(model, "draft")) < 64 * MIB
