"""Cached steps of LLaDA-8B compiled for several H200: each has its part of the bytes, and sums are few."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from benchmarks.steps.full import arguments
from jdllm.decoding.cached import refresh, reuse
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.decoding.unseen import Unseen
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays, pool_bytes, pool_shape
from jdllm.models.cards import ADDRESSES
from jdllm.models.config import ModelConfig
from jdllm.models.spread import abstract_parts, pool_config, pool_sharding
from jdllm.models.weights import Params, param_bytes
from jdllm.models.whole_layers import whole_layers_bytes
from jdllm.pallas.masked_logits import Level
from jdllm.planning.aot import compile_for, target_devices
from jdllm.planning.plan import UNLIMITED, Bucket, Workload, plan_bucket
from jdllm.serving.denoise.cached_packing import pack_refresh
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request
from tests.aot.chains import chain_of, spills_of
from tests.aot.packing import packed_reuse
from tests.engines import entry_of, generation_request

pytestmark = pytest.mark.aot

MIB, LENGTH, REQUESTS, LEFT = 2**20, 1024, 4, 2048
SAMPLING = SamplingParams(gen_length=256, block_length=32, cache="head_sparse", refresh_delay=0)


def on_cards(cards: int, *, whole_layers: bool = False) -> tuple[ModelConfig, Params, PageBook, KvArrays]:
    """The model, its weights, and a pool with its pages, for so many described cards."""
    config, devices = dataclasses.replace(SHAPES["llada-8b"], cards=cards), target_devices("h200", cards)
    book = PageBook.empty(1 + REQUESTS * LENGTH // PAGE_ROWS, PAGE_ROWS)
    for index in range(REQUESTS):
        book = book.allocate(index, LENGTH)
    at = pool_sharding(config, devices)
    shape = pool_shape(pool_config(config), book.pages, PAGE_ROWS)
    pool: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at)
    params = abstract_parts(config, "bfloat16", devices, whole_layers=whole_layers)
    return config, params, book, KvArrays(pool, pool)


def asked_of(config: ModelConfig) -> list[Request]:
    return [generation_request(i, np.arange(LENGTH - 256), SAMPLING, config) for i in range(REQUESTS)]


def sums_of(compiled: jax.stages.Compiled) -> int:
    """Sums over cards that a compiled text begins."""
    return len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text() or ""))


def exchanges_of(compiled: jax.stages.Compiled) -> int:
    """Sums that are kernels."""
    return len(re.findall(r"custom-call\(.*exchange_mosaic_gpu", compiled.as_text() or ""))


def joins_of(compiled: jax.stages.Compiled) -> int:
    """Kernels that join the rows of all cards."""
    return len(re.findall(r"custom-call\(.*join_mosaic_gpu", compiled.as_text() or ""))


@pytest.mark.parametrize("cards", [2, 8])
def test_each_card_has_its_part_of_a_refresh(cards: int):
    config, _, book, _ = on_cards(cards)
    compiled, head_rows = compiled_refresh(cards)
    # Two sums of a turn of the loop over layers, of which more cards send less by XLA's, and two of the last
    # layer, which has few rows.
    assert exchanges_of(compiled) == (4 if cards == 2 else 2)
    memory = compiled.memory_analysis()
    assert memory is not None
    whole = param_bytes(config, "bfloat16") + pool_bytes(config, "bfloat16", book.pages, PAGE_ROWS)
    assert whole / cards < memory.argument_size_in_bytes < whole / cards + 8 * MIB
    assert memory.alias_size_in_bytes >= pool_bytes(config, "bfloat16", book.pages, PAGE_ROWS) // cards
    bucket = Bucket(REQUESTS * LENGTH, REQUESTS * LENGTH, head_rows)
    workload = Workload(config.on_card(), cache_policy="head_sparse")
    planned = plan_bucket(workload, bucket, UNLIMITED).activation.peak_bytes
    assert abs(planned - memory.temp_size_in_bytes) < 0.05 * memory.temp_size_in_bytes + 64 * MIB


def compiled_refresh(cards: int, *, whole_layers: bool = False) -> tuple[jax.stages.Compiled, int]:
    """A refresh that scores keys, and its head rows."""
    config, params, book, pool = on_cards(cards, whole_layers=whole_layers)
    asked = asked_of(config)
    (batch, _), selection, table, _ = pack_refresh(asked, config, book, entry_of(asked))
    compiled = compile_for(
        "h200",
        refresh,
        *(params, batch, selection, table, pool),
        donate=("pool",),
        config=config,
        scored=True,
        usual=True,
        mask_id=config.mask_id,
        logits_chunks=1,
        level=Level.TOP,
        left=LEFT,
    )
    return compiled, len(batch.head.row)


@pytest.mark.parametrize("cards", [2, 8])
def test_a_refresh_with_whole_layers_joins_queries_too_and_writes_the_pool_in_place(cards: int):
    """Queries, keys and values of a turn of the loop and of the last layer, and hidden rows twice."""
    config, _, book, _ = on_cards(cards)
    (parts, _), (whole, _) = (compiled_refresh(cards, whole_layers=kept) for kept in (False, True))
    assert joins_of(whole) == 8
    assert exchanges_of(whole) == 0
    needed = [compiled.memory_analysis() for compiled in (parts, whole)]
    assert needed[0] is not None
    assert needed[1] is not None
    assert needed[1].temp_size_in_bytes <= needed[0].temp_size_in_bytes
    assert needed[1].alias_size_in_bytes >= pool_bytes(config, "bfloat16", book.pages, PAGE_ROWS) // cards


@pytest.mark.parametrize("cards", [2, 8])
def test_cards_with_whole_layers_send_keys_and_values_of_a_full_step_only(cards: int):
    """Four kernels join keys and values, of a turn of the loop and of the last layer, and two join hidden
    rows. No sums are left but that of the embedding, and no more memory is needed than with parts."""
    config, described, rows = dataclasses.replace(SHAPES["llada-8b"], cards=cards), "h200", 4096
    devices = target_devices(described, cards)
    batch, static = arguments(config, rows)
    batch = jax.tree.map(np.asarray, batch)
    parts, whole = (
        compile_for(
            described,
            denoise,
            *(abstract_parts(config, "bfloat16", devices, whole_layers=kept), batch, np.int32(1)),
            **static,
        )
        for kept in (False, True)
    )
    assert joins_of(whole) == 6
    assert exchanges_of(whole) == 0
    assert sums_of(whole) == 1
    needed = [compiled.memory_analysis() for compiled in (parts, whole)]
    assert needed[0] is not None
    assert needed[1] is not None
    assert needed[1].temp_size_in_bytes <= needed[0].temp_size_in_bytes
    layers = whole_layers_bytes(config, "bfloat16")
    assert layers < needed[1].argument_size_in_bytes < layers + param_bytes(config, "bfloat16") // cards


def without_addresses(params: Params) -> Params:
    return {name: x for name, x in params.items() if name != ADDRESSES}


def compiled_reuse(cards: int, requests: int, with_kernel: bool, *, chained: bool) -> jax.stages.Compiled:
    config, params, book, pool = on_cards(cards)
    params = params if with_kernel else without_addresses(params)
    (batch, _), table, source = packed_reuse(asked_of(config)[:requests], book, config)
    left: Any = jax.ShapeDtypeStruct((LEFT,), jnp.int32)
    return compile_for(
        "h200",
        reuse,
        *(params, batch, table, pool, Unseen(left, left, source), np.int32(1)),
        chained=chained,
        config=config,
        mask_id=config.mask_id,
        logits_chunks=1,
        level=Level.TOP,
    )


@pytest.mark.parametrize("with_kernel", [True, False])
def test_a_reuse_has_two_sums_a_layer(with_kernel: bool):
    """Each sum is one kernel where the weights have the addresses, and one of XLA's collectives elsewhere."""
    compiled = compiled_reuse(4, REQUESTS, with_kernel, chained=False)
    sums = 2 * 4  # layers of a turn of the loop
    assert exchanges_of(compiled) == (sums if with_kernel else 0)
    assert sums_of(compiled) == (0 if with_kernel else sums) + 1  # that of the embedding


@pytest.mark.parametrize("cards", [2, 8])
def test_a_chain_adds_over_cards_between_its_kernels(
    cards: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The kernels are those of one card, and nothing stands between them; no kernel leaves its registers."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compiled_reuse(cards, 2, with_kernel=True, chained=True)
    chain = chain_of(compiled.as_text() or "")
    assert chain.of_layers == 8 * SHAPES["llada-8b"].num_layers
    assert not chain.between
    assert not chain.constants
    assert exchanges_of(compiled) == 0
    assert sums_of(compiled) == 1
    assert spills_of("".join(capfd.readouterr())) == {("0", "0")}
