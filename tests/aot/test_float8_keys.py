"""Steps with keys and values in 8 bits compiled for an H200: pools are written in place, and nothing of their
size is beside them."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jdllm.compiling.executables import temp_bytes
from jdllm.decoding.cached import refresh, reuse
from jdllm.decoding.causal import decode, prefill
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays, empty_pool, pool_bytes
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import HOPPER
from jdllm.pallas.masked_logits import Level
from jdllm.planning.account import make_account
from jdllm.planning.aot import compile_for
from jdllm.planning.budget import Budget
from jdllm.planning.ladder import Entry
from jdllm.serving.causal.packing import pack_prompts, pack_sequences
from jdllm.serving.denoise.cached_packing import pack_refresh
from tests.aot import test_cached, test_causal
from tests.aot.chains import chain_of, spills_of
from tests.aot.packing import packed_reuse
from tests.engines import entry_of

pytestmark = pytest.mark.aot

CAUSAL, DENOISING = (
    dataclasses.replace(test.CONFIG, kv_cache_dtype="fp8") for test in (test_causal, test_cached)
)
MIB = 2**20


def compiled(function: Any, config: ModelConfig, arguments: tuple[Any, ...], **static: Any) -> Any:
    params = abstract_params(config, "bfloat16")
    return compile_for("h200", function, params, *arguments, config=config, level=Level.TOP, **static)


def in_place(executable: Any, config: ModelConfig, pages: int) -> bool:
    """Whether the results are in the memory of the pool that was given."""
    written = executable.memory_analysis().alias_size_in_bytes
    return written >= pool_bytes(config, "bfloat16", pages, PAGE_ROWS)


def pool_of(pages: int) -> KvArrays:
    return jax.eval_shape(lambda: empty_pool(DENOISING, pages, PAGE_ROWS, "bfloat16"))


@pytest.mark.parametrize("rows", [8192, 512])
def test_a_part_of_a_prompt(rows: int):
    requests, pool = test_causal.asked(65536, 1, CAUSAL)
    part = range(65536 - rows, 65536)
    packed = pack_prompts(requests, [part], CAUSAL, pool.book, Entry(rows, 8, 8, 1), 1024)
    executable = compiled(prefill, CAUSAL, (*packed.arguments, pool.abstract), donate=("pool",))
    assert in_place(executable, CAUSAL, test_causal.PAGES)
    account = make_account(CAUSAL, "bfloat16", Budget(40 << 30), device=HOPPER, max_num_batched_tokens=rows)
    assert temp_bytes(executable) < account.largest_step * 17 / 16


def test_a_decode():
    requests, pool = test_causal.asked(1024, 32, CAUSAL)
    for request in requests:
        request.computed = 1023
    entry = Entry(32, 32, 32, 16)
    packed = pack_sequences(requests, CAUSAL, pool.book, entry, 2 * test_causal.PAGES)
    arguments = (*packed.arguments, np.int32(1), pool.abstract)
    executable = compiled(decode, CAUSAL, arguments, donate=("pool",))
    assert in_place(executable, CAUSAL, test_causal.PAGES)
    assert temp_bytes(executable) < 64 * MIB
    assert 'custom_call_target="triton_kernel_call"' not in (executable.as_text() or "")


@pytest.mark.parametrize("cache", ["dual", "head_sparse"])
def test_a_refresh(cache: str):
    asked, pages = test_cached.requests(cache, config=DENOISING)
    (batch, _), selection, table, _ = pack_refresh(asked, DENOISING, pages, entry_of(asked))
    arguments = batch, selection, table, pool_of(pages.pages)
    static = test_cached.STATIC | {"scored": cache == "head_sparse", "left": test_cached.LEFT}
    static = {name: value for name, value in static.items() if name not in ("config", "level")}
    executable = compiled(refresh, DENOISING, arguments, donate=("pool",), **static)
    assert in_place(executable, DENOISING, pages.pages)
    planned = test_cached.plan_for(cache, test_cached.REQUESTS * test_cached.LENGTH, len(batch.head.row))
    assert temp_bytes(executable) < planned * 17 / 16 + 64 * MIB


def reused(chained: bool) -> Any:
    """A step that reuses stored keys and values."""
    asked, pages = test_cached.requests("dual", 2 if chained else test_cached.REQUESTS, DENOISING)
    (batch, _), table, source = packed_reuse(asked, pages, DENOISING)
    arguments = batch, table, pool_of(pages.pages), test_cached.unseen(source), np.int32(1)
    static = {"mask_id": DENOISING.mask_id, "logits_chunks": 1, "chained": chained}
    return compiled(reuse, DENOISING, arguments, **static)


def test_a_reuse():
    executable = reused(chained=False)
    assert temp_bytes(executable) < 64 * MIB
    assert "/split_attention/" in (executable.as_text() or "")
    assert 'custom_call_target="triton_kernel_call"' not in (executable.as_text() or "")


def test_nothing_stands_between_the_kernels_of_a_chain(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    executable = reused(chained=True)
    assert temp_bytes(executable) < 16 * MIB
    chain = chain_of(executable.as_text() or "")
    assert chain.of_layers == 8 * DENOISING.num_layers
    assert not chain.between
    assert not chain.constants
    assert spills_of("".join(capfd.readouterr())) == {("0", "0")}
