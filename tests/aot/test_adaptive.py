"""Adaptive steps of Dream-7B and a verifier of its size compiled for an H200: a warm-up has room for them."""

import dataclasses
import functools

import pytest

from benchmarks.shapes import SHAPES
from jdllm.compiling.executables import Executables, Program
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import HOPPER
from jdllm.planning.account import Account
from jdllm.planning.aot import compile_for
from jdllm.planning.budget import Budget
from jdllm.planning.ladder import denoising_tile_rows, make_ladder
from jdllm.planning.offloading import account_with_offloading
from jdllm.serving.adaptive.cached_runner import CachedAdaptiveRunner
from jdllm.serving.adaptive.runner import AdaptiveRunner
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.adaptive.verifier_keys import VerifierKeys, verifier_bytes, verifier_pages
from jdllm.serving.adaptive.verifying import Verifying
from jdllm.serving.background import Background
from jdllm.serving.denoise.full_runner import FullRunner
from jdllm.serving.on_device import OnDevice
from jdllm.serving.pool.kv_pool import KvPool

pytestmark = pytest.mark.aot

CONFIG = SHAPES["dream-7b"]
CAUSAL = dataclasses.replace(CONFIG, family="qwen2", attention="causal", logits_shift=False, mask_id=None)
VERIFIER = Verifier(abstract_params(CAUSAL, "bfloat16"), CAUSAL)
ROWS = 8192
LARGE = "adaptive step of 8192 rows"
REFRESH, REUSE = "adaptive refresh of 8192 rows", "adaptive reuse of 2560 rows"


def account_in(gib: int) -> Account:
    """In 40 GiB all layers are on the device. In 24 GiB most are in host memory."""
    return account_with_offloading(
        CONFIG,
        "bfloat16",
        Budget(gib << 30),
        device=HOPPER,
        max_num_batched_tokens=ROWS,
        verifier_bytes=verifier_bytes(VERIFIER, ROWS),
    )


def programs(account: Account) -> list[Program]:
    """All that a warm-up compiles for the verifier."""
    config = dataclasses.replace(CONFIG, offloaded=account.offloaded)
    ladder = make_ladder(account.rows, tile_rows=denoising_tile_rows(shifted=True))
    pool = KvPool(config, "bfloat16", account.pages)
    model = OnDevice(abstract_params(config, "bfloat16"), config, Executables("cuda"), account, pool)
    background = Background()
    full = FullRunner(model, ladder, background)
    verifying = Verifying(model, VERIFIER, VerifierKeys(VERIFIER, ROWS))
    both = CachedAdaptiveRunner(model, ladder, background, verifying)
    kinds = verifying, AdaptiveRunner(model, ladder, full, verifying), both
    return [program for kind in kinds for program in kind.programs()]


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (40, LARGE),
        (40, "verifier's reading of 1024 rows"),
        (24, LARGE),
        (40, REFRESH),
        (24, REFRESH),
        (40, REUSE),
        (40, "adaptive reuse of 40 rows"),
    ],
)
def test_the_largest_fit_beside_the_pool_and_write_pools_in_place(gib: int, name: str):
    account = account_in(gib)
    assert account.rows == ROWS
    assert (account.offloaded > 0) == (gib == 24)
    room = account.step_room(ROWS)
    assert room is not None
    found = [program for program in programs(account) if program.name == name]
    assert found
    for program in found:
        function, args, static, donate, *_ = program
        run = functools.partial(function, **static)
        compiled = compile_for("h200", run, *args, donate=donate)
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes - account.arriving < room.device
        pool = pool_bytes(CAUSAL, "bfloat16", verifier_pages(ROWS), PAGE_ROWS)
        drafts = pool_bytes(CONFIG, "bfloat16", account.pages, PAGE_ROWS) if name == REFRESH else 0
        assert memory.alias_size_in_bytes >= pool + drafts
