"""Steps of a ladder lowered for an H200: what they have in common is traced and lowered once."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest

from benchmarks.shapes import SHAPES
from jdllm.compiling.executable import donated_places
from jdllm.compiling.executables import Executables, Program
from jdllm.models.weights import abstract_params
from jdllm.pallas import shared_lowering
from jdllm.pallas.attention import kernel as attention
from jdllm.pallas.device import HOPPER
from jdllm.pallas.masked_logits import Level, merge
from jdllm.pallas.masked_logits import kernel as head
from jdllm.pallas.shared_lowering import LoweredKernels
from jdllm.planning.account import make_account
from jdllm.planning.aot import memory_of, target_sharding
from jdllm.planning.budget import Budget
from jdllm.planning.ladder import make_ladder
from jdllm.serving.background import Background
from jdllm.serving.denoise.cached_runner import CachedRunner
from jdllm.serving.denoise.full_runner import FullRunner
from jdllm.serving.on_device import OnDevice
from jdllm.serving.pool.kv_pool import KvPool

pytestmark = pytest.mark.aot

CONFIG = dataclasses.replace(SHAPES["llada-8b"], num_layers=2)
ROWS, CALL = 256, "mosaic_gpu_v2"


class CountingKernels(LoweredKernels):
    """Counts how often kernels were traced and lowered, by the module of their function."""

    def __init__(self):
        super().__init__(32)
        self.lowered: collections.Counter[str] = collections.Counter()

    def get(self, key: Any, lower: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        def counted() -> Callable[..., Any]:
            self.lowered[key[0].__module__] += 1
            return lower()

        return super().get(key, counted)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    kernels = CountingKernels()
    monkeypatch.setattr(shared_lowering, "kernels", kernels)
    return kernels.lowered


def programs() -> list[Program]:
    """Of as many rows and with the same head, one that stores nothing and one that stores keys and values."""
    params, executables = abstract_params(CONFIG, "bfloat16"), Executables("cuda")
    budget = Budget(memory_of("h200"))
    account = make_account(CONFIG, "bfloat16", budget, device=HOPPER, max_num_batched_tokens=8 * ROWS)
    pool, ladder = KvPool(CONFIG, "bfloat16", account.pages), make_ladder(account.rows)
    model = OnDevice(params, CONFIG, executables, account, pool)
    full = FullRunner(model, ladder, Background()).programs()
    cached = CachedRunner(model, ladder, Background()).programs()
    alike = [p for p in (*full, *cached) if len(p.args[1].tokens) == ROWS and len(p.args[1].head.row) < ROWS]
    return [program for program in alike if program.static["level"] == Level.FILTERED]


def lower(program: Program) -> str:
    function, args, static, donate, *_ = program
    sharding = target_sharding("h200")
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    (device,) = sharding.device_set
    with jax.default_device(device):
        return (
            jax.jit(lambda *a: function(*a, **static), donate_argnums=donated_places(function, donate))
            .lower(*placed)
            .as_text()
        )


def test_a_kernel_is_lowered_once_for_a_ladder(lowered: collections.Counter[str]):
    steps = programs()
    assert len(steps) == 2
    texts = [lower(steps[0])]
    # The last layer has fewer queries than the others.
    assert lowered == {attention.__name__: 2, head.__name__: 1, merge.__name__: 1}
    texts.append(lower(steps[1]))
    assert sum(lowered.values()) == 4
    assert [text.count(CALL) for text in texts] == [4, 4]
