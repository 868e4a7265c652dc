"""Cached steps of LLaDA-8B compiled for an H200: the pool is written in place, or only read."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import BLOCK_SHAPES, SHAPES
from jdllm.compiling.executables import temp_bytes
from jdllm.decoding.cached import last_layers, refresh, reuse, some_layers
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.unseen import Unseen
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays, pool_shape
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params, tree_bytes
from jdllm.pallas.quantised_matmul.limits import MOST_ROWS
from jdllm.planning.aot import compile_for
from jdllm.planning.budget import StepRoom
from jdllm.planning.plan import UNLIMITED, Bucket, Workload, plan_bucket
from jdllm.quantised import WeightForm
from jdllm.serving.denoise.cached_packing import pack_refresh
from jdllm.serving.denoise.cached_runner import LEVELS
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request
from tests.aot.chains import chain_of, spills_of
from tests.aot.packing import packed_reuse
from tests.engines import entry_of, generation_request

pytestmark = pytest.mark.aot

CONFIG = SHAPES["llada-8b"]
MIB = 2**20
LENGTH, REQUESTS = 1024, 4
LEFT = 2048
PAGES = 1 + 16 * REQUESTS * LENGTH // PAGE_ROWS  # a layer's keys are half a GiB
STATIC = {"config": CONFIG, "mask_id": CONFIG.mask_id, "logits_chunks": 1, "level": LEVELS[0]}


def requests(
    cache: str, count: int = REQUESTS, config: ModelConfig = CONFIG
) -> tuple[list[Request], PageBook]:
    sampling = SamplingParams(gen_length=256, block_length=32, cache=cache, refresh_delay=0)  # pyright: ignore
    pages = PageBook.empty(PAGES, PAGE_ROWS)
    out = [generation_request(i, np.arange(LENGTH - 256), sampling, config) for i in range(count)]
    for request in out:
        pages = pages.allocate(request.id, LENGTH)
    return out, pages


def abstract_pool(pages: PageBook, config: ModelConfig = CONFIG) -> KvArrays:
    array: Any = jax.ShapeDtypeStruct(pool_shape(config, pages.pages, PAGE_ROWS), jnp.bfloat16)
    return KvArrays(array, array)


def layer_bytes(pages: PageBook) -> int:
    """Keys of one layer."""
    return int(np.prod(pool_shape(CONFIG, pages.pages, PAGE_ROWS)[1:])) * 2


def plan_for(cache: Any, rows: int, head_rows: int) -> int:
    """Bytes of temporaries that the plan gives a refresh."""
    bucket = Bucket(rows, rows, head_rows)
    return plan_bucket(Workload(CONFIG, cache_policy=cache), bucket, UNLIMITED).activation.peak_bytes


@pytest.mark.parametrize("cache", ["dual", "head_sparse"])
def test_a_refresh_is_as_planned_and_copies_no_layer_of_the_pool(cache: str):
    asked, pages = requests(cache)
    (batch, _), selection, table, _ = pack_refresh(asked, CONFIG, pages, entry_of(asked))
    params = abstract_params(CONFIG, "bfloat16")
    pool = abstract_pool(pages)
    arguments = (params, batch, selection, table, pool)
    compiled = compile_for(
        "h200",
        refresh,
        *arguments,
        donate=("pool",),
        scored=cache == "head_sparse",
        left=LEFT,
        **STATIC,
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    planned = plan_for(cache, REQUESTS * LENGTH, len(batch.head.row))
    assert abs(planned - memory.temp_size_in_bytes) < 0.05 * memory.temp_size_in_bytes + 64 * MIB
    assert planned + 64 * MIB < layer_bytes(pages)
    assert memory.alias_size_in_bytes >= 2 * CONFIG.num_layers * layer_bytes(pages)
    gathers = re.findall(r"^%fused_gather.*?^}", compiled.as_text() or "", re.MULTILINE | re.DOTALL)
    assert gathers
    assert not any("reduce-window" in gather for gather in gathers), "sums for each number that is gathered"


@pytest.mark.parametrize("cache", ["dual", "head_sparse"])
def test_a_cut_refresh_is_as_planned_and_writes_each_layer_before_the_next(cache: Any):
    """Else keys and values of all layers would be kept until the end."""
    config, length = dataclasses.replace(CONFIG, num_layers=4), 16 * LENGTH
    sampling = SamplingParams(gen_length=256, block_length=32, cache=cache, refresh_delay=0)
    request = generation_request(0, np.arange(length - 256), sampling, config)
    pages = PageBook.empty(2 + length // PAGE_ROWS, PAGE_ROWS).allocate(request.id, length)
    (batch, _), selection, table, _ = pack_refresh([request], config, pages, entry_of([request]))
    pool = abstract_pool(pages, config)
    plan = plan_bucket(
        Workload(config, cache_policy=cache), Bucket(0, length, len(batch.head.row)), StepRoom(480 * MIB)
    )
    assert plan.fits
    assert not plan.chunks.layers_whole
    arguments = (abstract_params(config, "bfloat16"), batch, selection, table, pool)
    form: dict[str, Any] = {"donate": ("pool",), "scored": cache == "head_sparse", "left": LEFT}
    static: dict[str, Any] = STATIC | {"config": config, "chunks": plan.chunks, "usual": True}
    needed = temp_bytes(compile_for("h200", refresh, *arguments, **form, **static))
    assert abs(plan.activation.peak_bytes - needed) < 0.02 * needed


@pytest.mark.parametrize(("form", "count"), [("int8", REQUESTS), ("int4", REQUESTS), ("int4", 1)])
def test_a_refresh_of_quantised_weights_has_room_for_a_wide_matrix(form: WeightForm, count: int):
    """Up to 2048 rows are multiplied by a kernel that makes no wide matrix."""
    config, rows = CONFIG.quantised(form), count * LENGTH
    asked, pages = requests("dual", count)
    (batch, _), selection, table, _ = pack_refresh(asked, config, pages, entry_of(asked))
    arguments = (abstract_params(config, "bfloat16"), batch, selection, table, abstract_pool(pages))
    static: dict[str, Any] = STATIC | {"config": config, "scored": False, "left": LEFT}
    executable = compile_for("h200", refresh, *arguments, donate=("pool",), **static)
    needed, bucket = temp_bytes(executable), Bucket(rows, rows, len(batch.head.row))
    planned = plan_bucket(Workload(config, cache_policy="dual"), bucket, UNLIMITED).activation.peak_bytes
    assert abs(planned - needed) < 0.05 * needed + 64 * MIB
    wide = planned - plan_for("dual", rows, len(batch.head.row)) > 48 * MIB
    assert wide == (rows > MOST_ROWS)
    assert wide or "quantised_matmul" in (executable.as_text() or "")


def test_kernels_run_side_by_side_in_the_memory_of_twice_the_rows():
    asked, pages = requests("head_sparse")
    (batch, _), selection, table, _ = pack_refresh(asked, CONFIG, pages, entry_of(asked))
    arguments = (abstract_params(CONFIG, "bfloat16"), batch, selection, table, abstract_pool(pages))
    form: dict[str, Any] = {"donate": ("pool",), "scored": True, "left": LEFT, "concurrent": True}
    needed = temp_bytes(compile_for("h200", refresh, *arguments, **form, **STATIC))
    assert needed < plan_for("head_sparse", 2 * REQUESTS * LENGTH, len(batch.head.row))


def unseen(source: np.ndarray) -> Unseen:
    left = np.zeros(LEFT, np.int32)
    return Unseen(left, left, source)


def test_a_reuse_copies_no_layer_of_the_pool():
    asked, pages = requests("dual")
    (batch, _), table, source = packed_reuse(asked, pages, CONFIG)
    params, pool = abstract_params(CONFIG, "bfloat16"), abstract_pool(pages)
    arguments = (params, batch, table, pool, unseen(source), np.int32(1))
    compiled = compile_for("h200", reuse, *arguments, **STATIC)
    assert temp_bytes(compiled) < 64 * MIB


@pytest.mark.parametrize(
    ("config", "count"),
    [
        pytest.param(CONFIG, 2, id="llada-8b"),
        pytest.param(SHAPES["dream-7b"], 1, id="dream-7b"),
        pytest.param(BLOCK_SHAPES["sdar-8b"], 1, id="sdar-8b"),
        pytest.param(CONFIG.quantised("int8"), 2, id="llada-8b-int8"),
        pytest.param(CONFIG.quantised("int4"), 2, id="llada-8b-int4"),
        pytest.param(CONFIG.quantised("fp8"), 2, id="llada-8b-fp8"),
    ],
)
def test_nothing_stands_between_the_kernels_of_a_chain(
    config: ModelConfig, count: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """So many requests have few enough rows; kernels keep to their registers, or nearly so."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    asked, pages = requests("dual", count, config)
    (batch, _), table, source = packed_reuse(asked, pages, config)
    pool, static = abstract_pool(pages, config), STATIC | {"config": config, "mask_id": config.mask_id}
    arguments = (abstract_params(config, "bfloat16"), batch, table, pool, unseen(source), np.int32(1))
    compiled = compile_for("h200", reuse, *arguments, chained=True, **static)
    assert temp_bytes(compiled) < 16 * MIB
    chain = chain_of(compiled.as_text() or "")
    assert chain.of_layers == (9 if config.qk_norm else 8) * config.num_layers
    assert not chain.between
    assert not chain.constants
    assert chain.beside <= 33  # the next step waits for them
    printed = "".join(capfd.readouterr())
    # Queries of 40 rows of 7 heads are copied in many short runs.
    assert max(int(stored) for _, stored in spills_of(printed)) <= (0 if config.num_kv_heads > 4 else 128)


def counted_turns(compiled: Any) -> int:
    """Loops whose turns the device counts, and branches that it chooses: the host waits for each."""
    lines = (compiled.as_text() or "").splitlines()
    loops = [line for line in lines if " while(" in line and "known_trip_count" not in line]
    return len(loops) + sum(" conditional(" in line for line in lines)


def test_the_host_need_not_wait_for_a_usual_part():
    """What is launched next then follows at once. A loop of steps shows that the count counts."""
    asked, pages = requests("head_sparse")
    (batch, _), selection, table, _ = pack_refresh(asked, CONFIG, pages, entry_of(asked))
    params, pool = abstract_params(CONFIG, "bfloat16"), abstract_pool(pages)
    arguments = (params, batch, selection, table, pool)
    form = {"scored": True, "usual": True, "left": LEFT}
    refreshed = compile_for("h200", refresh, *arguments, donate=("pool",), **form, **STATIC)
    assert counted_turns(refreshed) == 0
    (batch, _), table, source = packed_reuse(asked, pages, CONFIG)
    arguments = (params, batch, table, pool, unseen(source))
    for steps, counted in ((None, 0), (np.int32(1), 1)):
        assert counted_turns(compile_for("h200", reuse, *arguments, steps, **STATIC)) == counted


@pytest.mark.parametrize("part", ["some", "last"])
def test_layers_of_a_refresh_write_the_pool_in_place_and_the_host_need_not_wait(part: str):
    """Beside the pool, only hidden rows stay from part to part, and some layers replace them. XLA copies
    the weights of a layer whose number only the device knows."""
    asked, pages = requests("head_sparse")
    (batch, _), selection, table, _ = pack_refresh(asked, CONFIG, pages, entry_of(asked))
    params, pool = abstract_params(CONFIG, "bfloat16"), abstract_pool(pages)
    rows = len(batch.tokens)
    hidden = jax.ShapeDtypeStruct((rows, CONFIG.hidden_size), jnp.bfloat16)
    if part == "some":
        arguments = params, hidden, batch.rows, selection, table, np.int32(3), pool
        donate = ("hidden", "pool")
        compiled = compile_for("h200", some_layers, *arguments, donate=donate, config=CONFIG, count=4)
    else:
        arguments = params, batch, selection, table, hidden, pool
        compiled = compile_for("h200", last_layers, *arguments, donate=("pool",), count=4, **STATIC)
    memory = compiled.memory_analysis()
    assert memory is not None
    hidden_bytes = rows * CONFIG.hidden_size * 2
    copied = tree_bytes(params["layers"]) // CONFIG.num_layers if part == "some" else 0
    planned = plan_for("head_sparse", rows, len(batch.head.row))
    assert memory.temp_size_in_bytes < planned + copied + 64 * MIB
    assert memory.temp_size_in_bytes < layer_bytes(pages)
    kept = 2 * CONFIG.num_layers * layer_bytes(pages) + hidden_bytes * (part == "some")
    assert memory.alias_size_in_bytes >= kept
    assert counted_turns(compiled) == 0
