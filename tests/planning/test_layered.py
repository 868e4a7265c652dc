"""Plans of sequences that run layer by layer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import CAUSAL_SHAPES, SHAPES
from jdllm.decoding.cache_policies import kept as kept_rows
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.weights import param_bytes
from jdllm.planning.budget import Budget
from jdllm.planning.layered import Layered, longest_layered, plan_layered, retention_of

CONFIG = CAUSAL_SHAPES["llama-3.1-8b"]
GIB = 2**30
WEIGHTS = param_bytes(CONFIG, "bfloat16")


def model(memory: float, host: float) -> Layered:
    return Layered(CONFIG, "bfloat16", Budget(int(memory * GIB), host=int(host * GIB)), WEIGHTS)


def keys(rows: int) -> int:
    """Bytes of one layer, from the shapes of its arrays."""
    return 2 * math.prod((rows, CONFIG.num_kv_heads, CONFIG.head_dim, 2))


@given(
    memory=st.floats(16, 100),
    host=st.floats(0, 200),
    prompt=st.integers(1, 1 << 21),
    generated=st.integers(1, 1000),
)
def test_what_is_alive_fits(memory: float, host: float, prompt: int, generated: int):
    """Summed up from arrays: the residual stream, keys on their way, and keys that stay."""
    asked = model(memory, host)
    plan = plan_layered(asked, prompt, generated)
    if plan is None:
        return
    rows, chunk, behind, kept, kept_behind, stored = plan.layering
    assert stored == rows
    assert prompt <= rows
    assert rows % chunk == 0
    assert generated <= behind
    layers, fixed = CONFIG.num_layers, asked.budget.overhead + WEIGHTS + layers_behind(behind)
    stream = rows * CONFIG.hidden_size * 2
    assert fixed + stream + (2 + kept) * keys(rows) + plan.temporaries <= plan.prompt_bytes
    in_flight = 0 if kept_behind == layers else 2
    assert fixed + (in_flight + kept_behind) * keys(rows) <= plan.token_bytes
    assert max(plan.prompt_bytes, plan.token_bytes) <= asked.budget.device
    assert plan.host_bytes == (layers - kept) * keys(rows) <= asked.budget.host
    assert kept <= kept_behind <= layers
    assert plan.back_bytes + plan.streamed_bytes == plan.host_bytes


@given(
    memory=st.floats(17, 60),
    host=st.floats(0, 64),
    length=st.integers(1, 1 << 20),
    retention=st.floats(0.01, 1),
    cache=st.sampled_from(["sparse", "head_sparse"]),
)
def test_a_sparse_cache_keeps_its_share(
    memory: float, host: float, length: int, retention: float, cache: str
):
    """Summed up from arrays: while a layer is computed, keys of all rows; of other layers those it keeps."""
    sampling = SamplingParams(cache=cache, retention=retention)  # pyright: ignore[reportArgumentType]
    config = SHAPES["llada-8b"]
    weights = param_bytes(config, "bfloat16")
    budget = Budget(int(memory * GIB), host=int(host * GIB))
    model = Layered(config, "bfloat16", budget, weights, retention=retention_of(sampling))
    plan = plan_layered(model, length, 0)
    if plan is None:
        return
    row = 2 * config.num_kv_heads * config.head_dim * 2
    rows, stored, kept = plan.layering.rows, plan.layering.stored, plan.layering.kept
    assert kept_rows(sampling, length) <= stored <= rows
    assert plan.temporaries >= rows * row
    held = rows * config.hidden_size * 2 + (2 + kept) * stored * row + plan.temporaries
    assert budget.overhead + weights + held <= plan.prompt_bytes <= budget.device
    assert plan.host_bytes == (config.num_layers - kept) * stored * row <= budget.host
    assert plan.back_bytes + plan.streamed_bytes == plan.host_bytes


def layers_behind(rows: int) -> int:
    return CONFIG.num_layers * keys(rows)


@pytest.mark.parametrize(
    ("memory", "host", "least"), [(80, 96, 1_000_000), (24, 64, 400_000), (80, 0, 400_000)]
)
def test_the_longest_is_the_longest(memory: float, host: float, least: int):
    asked = model(memory, host)
    longest = longest_layered(asked, 16)
    assert longest >= least
    assert plan_layered(asked, longest, 16) is not None
    assert plan_layered(asked, longest + 1, 16) is None


def test_no_host_memory_is_used_where_the_device_has_room():
    plan = plan_layered(model(80, 64), 262144, 16)
    assert plan is not None
    assert plan.host_bytes == plan.streamed_bytes == 0


def test_more_memory_keeps_more_layers():
    plans = [plan_layered(model(memory, 200), 600_000, 16) for memory in (40, 60, 80, 100)]
    kept = [plan.layering.kept for plan in plans if plan is not None]
    assert len(kept) == len(plans)
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]
