"""The transformer with its residual stream, and keys and values, in host memory."""

import collections
import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.compiling.executables import Executables
from jdllm.execution.offload.forward import forward_tiered
from jdllm.execution.offload.parts import accumulate
from jdllm.execution.offload.tiers import HostTiers, device_buffers, host_buffers, transfer_bytes
from jdllm.execution.transformer import embed, forward
from jdllm.host_memory import IN_FLIGHT, pipeline
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig, MoeConfig
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params, is_spec, spec_tree
from jdllm.serving.packing import lay_out

TIERS = {
    "residual": HostTiers(128),
    "groups": HostTiers(128, head_groups=2),
    "kv": HostTiers(128, kv=True),
    "wide": HostTiers(256, kv=True),
}
DEVICE = jax.devices()[0]
RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(0, 500, length) for length in (5, 210, 90)]
"""320 rows in their bucket: chunks of 128 and of 256 leave a rest, and segments cross their bounds."""


def slow(value: object):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def executables() -> Executables:
    return Executables("cpu")


@functools.partial(jax.jit, static_argnames="config")
def whole(params: Params, config: ModelConfig, tokens, rows: Rows) -> jax.Array:
    return forward(params, config, tokens, rows)


def check(params: Params, config: ModelConfig, tokens, rows: Rows, tiers: HostTiers, call) -> None:
    expected = np.asarray(whole(params, config, tokens, rows))
    chunks = forward_tiered(params, config, tokens, rows, tiers=tiers, call=call)
    assert [len(c) for c in chunks] == [stop - start for start, stop in tiers.bounds(len(tokens))]
    assert {c.sharding.memory_kind for c in chunks} == {"pinned_host"}
    largest = np.abs(expected).max()
    assert largest > 1
    np.testing.assert_allclose(np.concatenate(chunks), expected, rtol=0, atol=1e-5 * largest)


class TestEqualsForward:
    @pytest.mark.parametrize("name", ["residual", slow("groups"), slow("kv"), "wide"])
    def test_llada(self, name: str, params: Params, config: ModelConfig, executables: Executables):
        tokens, rows, _ = lay_out(SEQUENCES, config)
        check(params, config, tokens, rows, TIERS[name], executables.call)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["groups", slow("wide")])
    def test_biases_and_shared_heads(
        self, name: str, dream_params: Params, dream_config: ModelConfig, executables: Executables
    ):
        assert dream_config.num_kv_heads < dream_config.num_heads
        assert dream_config.qkv_bias
        tokens, rows, _ = lay_out(SEQUENCES, dream_config)
        check(dream_params, dream_config, tokens, rows, TIERS[name], executables.call)

    @pytest.mark.parametrize("tiers", [slow(HostTiers(128)), HostTiers(128, kv=True)])
    @pytest.mark.slow
    def test_layers_with_and_without_experts(
        self, tiers: HostTiers, config: ModelConfig, executables: Executables
    ):
        moe = MoeConfig(experts=4, top_k=2, expert_size=24, expert_bias=True, dense_layers=(1,))
        mixed = dataclasses.replace(config, family="llada_moe", qk_norm=True, num_layers=3, moe=moe)
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda spec: jnp.asarray(rng.normal(0.2, 0.1, spec.shape), jnp.float32),
            spec_tree(mixed),
            is_leaf=is_spec,
        )
        tokens, rows, _ = lay_out(SEQUENCES[:2], mixed)
        check(params, mixed, tokens, rows, tiers, executables.call)

    def test_chunks_of_keys_that_no_row_sees_are_skipped(
        self, params: Params, config: ModelConfig, executables: Executables
    ):
        windowed = dataclasses.replace(config, attention="causal", sliding_window=100)
        length = 512
        rows = Rows(np.arange(length), *key_ranges(windowed, 0, length))
        calls = collections.Counter()

        def call(function, *args, **options):
            calls[function] += 1
            return executables.call(function, *args, **options)

        check(params, config, RNG.integers(0, 500, length), rows, HostTiers(128, kv=True), call)
        # each chunk of rows sees itself and, but for the first, the one before
        assert calls[accumulate] == 7 * config.num_layers


class TestMemory:
    rows = 1024

    @pytest.mark.slow
    @pytest.mark.parametrize("name", TIERS)
    def test_arrays_and_transfers_are_those_listed(
        self, name: str, params: Params, config: ModelConfig, executables: Executables, monkeypatch
    ):
        tiers, moved, peak = TIERS[name], collections.Counter(), collections.Counter()
        copy = jax.device_put

        def device_put(tree, sharding):
            for leaf in jax.tree.leaves(tree):
                if leaf.dtype == np.float32 and leaf.sharding.memory_kind != sharding.memory_kind:
                    moved[sharding.memory_kind] += leaf.nbytes
            return copy(tree, sharding)

        def alive() -> collections.Counter:
            sizes = collections.Counter()
            for array in jax.live_arrays():
                sizes[array.sharding.memory_kind] += array.nbytes
            return sizes

        def call(function, *args, **options):
            out = executables.call(function, *args, **options)
            if function is not embed:
                for kind, size in alive().items():
                    peak[kind] = max(peak[kind], size - before[kind])
            return out

        gc.collect()
        before = alive()
        monkeypatch.setattr(jax, "device_put", device_put)
        column = np.zeros(self.rows, np.int32)
        forward_tiered(
            params, config, column, Rows(column, column, column + self.rows), tiers=tiers, call=call
        )
        args = (config, tiers, self.rows, "float32")
        on_device, on_host = (sum(f(*args).values()) for f in (device_buffers, host_buffers))
        # What is on its way out is no longer referenced, so that the arrays alive are a little less.
        assert 0.75 * on_device < peak["device"] <= on_device
        assert 0.75 * on_host < peak["pinned_host"] <= on_host
        layers = [config.num_layers * size for size in transfer_bytes(*args)]
        hidden = self.rows * config.hidden_size * 4
        assert moved == {"device": layers[0], "pinned_host": layers[1] + hidden}

    def test_bytes_of_llada_8b_at_a_million_rows(self):
        config, rows, gib = SHAPES["llada-8b"], 1 << 20, 1 << 30
        groups = device_buffers(config, HostTiers(4096, head_groups=8), rows, "bfloat16")
        assert groups["keys and values"] == 2 * gib
        assert sum(groups.values()) < 3.1 * gib
        assert sum(device_buffers(config, HostTiers(16384, kv=True), rows, "bfloat16").values()) < 3 * gib
        on_host = host_buffers(config, HostTiers(16384, kv=True), rows, "bfloat16")
        assert on_host["keys and values"] == 16 * gib
        assert 8 * gib < on_host["residual"] < 8.4 * gib


class Result:
    """Stands for an array: records when it is waited for."""

    def __init__(self, log: list, item: int):
        self._log, self._item = log, item

    def block_until_ready(self) -> None:
        self._log.append(("done", self._item))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_pipeline_fetches_before_it_computes_and_waits_before_it_fetches(count: int):
    log: list[tuple[str, int]] = []

    def fetch(item: int) -> int:
        log.append(("fetch", item))
        return -item

    def work(item: int, fetched: int) -> Result:
        assert fetched == -item
        log.append(("work", item))
        return Result(log, item)

    pipeline(range(count), fetch, work)
    assert len(set(log)) == len(log) == 3 * count
    at = {event: place for place, event in enumerate(log)}
    for item in range(count):
        assert at["fetch", item] < at["work", item] < at["done", item]
        if item + 1 < count:
            assert at["work", item] < at["work", item + 1]
            assert at["fetch", item + 1] < at["work", item]
        if item >= IN_FLIGHT:
            assert at["done", item - IN_FLIGHT] < at["fetch", item]


class TestHostTiers:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"chunk_rows": 0}, "chunk_rows is 0, expected a positive multiple of 128"),
            ({"chunk_rows": 200}, "chunk_rows is 200, expected a positive multiple of 128"),
            ({"chunk_rows": 128, "head_groups": 0}, "head_groups is 0, expected at least 1"),
            ({"chunk_rows": 128, "head_groups": 2, "kv": True}, "head_groups is 2, expected 1 with kv"),
        ],
    )
    def test_refuses(self, options: dict, message: str):
        with pytest.raises(ValueError, match=message):
            HostTiers(**options)

    def test_groups_must_divide_the_heads(
        self, params: Params, config: ModelConfig, executables: Executables
    ):
        column = np.zeros(128, np.int32)
        with pytest.raises(ValueError, match="head_groups is 3, which does not divide 4 key-value heads"):
            forward_tiered(
                params,
                config,
                column,
                Rows(column, column, column),
                tiers=HostTiers(128, head_groups=3),
                call=executables.call,
            )
