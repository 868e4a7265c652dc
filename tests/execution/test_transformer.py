"""The transformer against recorded layer outputs, an independent float64 form, and itself in chunks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdllm.chunks import ChunkConfig
from jdllm.execution.module import Transformer
from jdllm.execution.transformer import (
    Wanted,
    embed,
    final_norm,
    forward,
    forward_wanted,
    logits,
    packed_ranges,
)
from jdllm.layers import rms_norm
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Layer
from jdllm.models.weights import Params, TensorSpec, abstract_params, init_params, is_spec, spec_tree
from jdllm.serving.packing import lay_out
from tests.benchmarks.shapes import small
from tests.models import numpy_transformer
from tests.pallas.jaxprs import largest_intermediate

WHOLE = ChunkConfig()
Arrays = dict[str, np.ndarray]

close = functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-4)


@functools.partial(jax.jit, static_argnames=("config", "chunks"))
def evaluate(params: Params, config: ModelConfig, tokens, rows: Rows, chunks: ChunkConfig = WHOLE):
    return logits(params, config, forward(params, config, tokens, rows, chunks=chunks))


def packed_logits(
    params: Params, config: ModelConfig, sequences: list[np.ndarray], **options
) -> list[np.ndarray]:
    """Logits of each sequence, all evaluated in one packed batch."""
    tokens, rows, starts = lay_out(sequences, config)
    out = np.asarray(evaluate(params, config, tokens, rows, **options))
    return [out[start : start + len(ids)] for start, ids in zip(starts, sequences, strict=True)]


def test_norm_rounds_before_it_multiplies_by_the_weight():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((50, 64), 64))
    exact = np.asarray(x, np.float64)
    normed = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-5)
    rounded = np.asarray(normed.astype(x.dtype), np.float64) * np.asarray(weight, np.float64)
    actual = rms_norm(x, weight, 1e-5)
    # f32 may round a normed value to the other side: allow that one in a thousand
    assert (np.asarray(actual) == rounded.astype(x.dtype)).mean() > 0.999


@pytest.mark.parametrize("name", ["fwd_b1", "fwd_batch", "fwd_nomask"])
def test_logits(name: str, params: Params, config: ModelConfig, goldens: Arrays):
    actual = packed_logits(params, config, list(goldens[f"{name}.input_ids"]))
    close(actual, goldens[f"{name}.logits"])


def test_logits_of_a_long_sequence(params: Params, config: ModelConfig, goldens: Arrays):
    (actual,) = packed_logits(params, config, list(goldens["fwd_long.input_ids"]))
    close(actual[-8:], goldens["fwd_long.logits_last8"][0])


def test_every_branch_of_every_layer(params: Params, config: ModelConfig, goldens: Arrays):
    tokens = goldens["fwd_b1.input_ids"][0]
    length = len(tokens)
    rows = Rows(np.arange(length), np.zeros(length, int), np.full(length, length))

    @jax.jit
    def outputs(params: Params) -> dict[str, jax.Array]:
        sees = packed_ranges(config, rows)
        h = embed(params, tokens)
        out = {"embed": h}
        for i in range(config.num_layers):
            layer = Layer({name: leaf[i] for name, leaf in params["layers"].items()}, config)
            attended = layer.project_back(sees.attend(layer, h)[0])
            fed = layer.feed_forward(h + attended)
            h = h + attended + fed
            out |= {f"layer{i}.attn_out": attended, f"layer{i}.ff_out": fed, f"layer{i}": h}
        return out | {"final_norm": final_norm(params, config, h)}

    actual = outputs(params)
    recorded = {name.removeprefix("fwd_b1.hidden.") for name in goldens if name.startswith("fwd_b1.hidden.")}
    assert set(actual) == recorded
    for name, rows_out in actual.items():
        close(rows_out, goldens[f"fwd_b1.hidden.{name}"][0], err_msg=name)


@pytest.mark.parametrize("name", ["pad_left", "pad_right"])
def test_padding_is_replaced_by_packing(name: str, params: Params, config: ModelConfig, goldens: Arrays):
    real = goldens[f"{name}.attention_mask"].astype(bool)
    ids = goldens[f"{name}.input_ids"]
    actual = packed_logits(params, config, [row[keep] for row, keep in zip(ids, real, strict=True)])
    assert (~real).any()
    close(np.concatenate(actual), goldens[f"{name}.logits"][real])


def test_block_causal_attention_through_key_ranges(params: Params, config: ModelConfig, goldens: Arrays):
    visible = goldens["bias_blockcausal.attention_bias"][0, 0].astype(bool)
    length = len(visible)
    start, count = visible.argmax(axis=1), visible.sum(axis=1)
    np.testing.assert_array_equal(
        visible, (np.arange(length) >= start[:, None]) & (np.arange(length) < (start + count)[:, None])
    )
    rows = Rows(np.arange(length), start, start + count)
    actual = evaluate(params, config, goldens["bias_blockcausal.input_ids"][0], rows)
    close(actual, goldens["bias_blockcausal.logits"][0])


@pytest.fixture(scope="module")
def gqa_config(config: ModelConfig) -> ModelConfig:
    """Shared key-value heads, heads wider than hidden / heads, a tied head, an odd number of layers."""
    return dataclasses.replace(
        config,
        hidden_size=24,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=40,
        num_layers=3,
        vocab_size=90,
        tied_head=True,
        mask_id=89,
        eos_id=88,
    )


@pytest.fixture(scope="module")
def gqa_model(gqa_config: ModelConfig) -> Transformer:
    """Weights large enough that every branch counts, norm weights other than one."""
    rng = np.random.default_rng(0)

    def draw(spec: TensorSpec) -> jax.Array:
        mean = 1.0 if spec.init_std == 0 else 0.0
        return jnp.asarray(rng.normal(mean, 0.2, spec.shape), jnp.float32)

    return Transformer(gqa_config, jax.tree.map(draw, spec_tree(gqa_config), is_leaf=is_spec))


class TestAgainstNumpy:
    def test_the_oracle_itself(self, params: Params, config: ModelConfig, goldens: Arrays):
        actual = numpy_transformer.logits(params, config, goldens["fwd_b1.input_ids"][0])
        close(actual, goldens["fwd_b1.logits"][0])

    def test_shared_heads_tied_head_ragged_batch(self, gqa_model: Transformer):
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, 90, length) for length in (5, 31, 1, 17)]
        params, config = gqa_model.params(), gqa_model.config
        for ids, actual in zip(sequences, packed_logits(params, config, sequences), strict=True):
            expected = numpy_transformer.logits(params, config, ids)
            np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)
            assert np.abs(expected).max() > 1


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """Chunks of single rows, so that a few rows are cut into many."""
    monkeypatch.setattr("jdllm.chunks.TILE", 1)


ONE_CUT = [{"ffn": 7}, {"query": 3}, {"kv": 5}, {"heads": 2}]
ALL_CUTS = {"ffn": 2, "query": 7, "kv": 3, "heads": 2}


class TestChunks:
    # Products of other shapes may sum in another order: a few ulps of values up to 22.

    @pytest.mark.parametrize(
        "counts", [*(pytest.param(c, marks=pytest.mark.slow) for c in ONE_CUT), ALL_CUTS], ids=str
    )
    def test_recorded_batch(
        self, counts: dict[str, int], params: Params, config: ModelConfig, goldens: Arrays, small_tiles
    ):
        sequences = list(goldens["fwd_batch.input_ids"])
        whole = packed_logits(params, config, sequences)
        jax.clear_caches()
        cut = packed_logits(params, config, sequences, chunks=ChunkConfig(**counts))
        np.testing.assert_allclose(cut, whole, atol=2e-5, rtol=1e-5)

    @pytest.mark.parametrize("counts", [*ONE_CUT, ALL_CUTS], ids=str)
    @pytest.mark.slow
    def test_grouped_query_heads(self, counts: dict[str, int], gqa_model: Transformer, small_tiles):
        params, config = gqa_model.params(), gqa_model.config
        ids = np.random.default_rng(6).integers(0, 90, 37)
        cut = packed_logits(params, config, [ids], chunks=ChunkConfig(**counts))[0]
        np.testing.assert_allclose(cut, numpy_transformer.logits(params, config, ids), atol=1e-4, rtol=1e-4)


def test_head_groups_must_divide_the_heads(params: Params, config: ModelConfig):
    with pytest.raises(ValueError, match="3 head groups do not divide"):
        packed_logits(params, config, [np.arange(5)], chunks=ChunkConfig(heads=3))


class TestMemory:
    rows = 4096

    def largest(self, config: ModelConfig, chunks: ChunkConfig) -> int:
        column = np.zeros(self.rows, np.int32)
        params = abstract_params(config, "float32")

        def run(params, tokens, rows):
            return forward(params, config, tokens, rows, chunks=chunks)

        return largest_intermediate(run, params, column, Rows(column, column, column))

    def test_nothing_of_rows_times_rows(self, config: ModelConfig):
        assert self.largest(config, ChunkConfig()) < self.rows * self.rows

    def test_ffn_chunks_bound_the_widest_temporaries(self, config: ModelConfig):
        wide = dataclasses.replace(config, intermediate_size=8192)
        assert self.largest(wide, ChunkConfig()) == self.rows * 8192
        assert self.largest(wide, ChunkConfig(ffn=4)) == self.rows * 8192 // 4


class TestModule:
    def test_call_equals_the_recorded_logits(self, params: Params, config: ModelConfig, goldens: Arrays):
        model = Transformer(config, params)
        actual = jax.jit(model)(jnp.asarray(goldens["fwd_batch.input_ids"]))
        close(actual, goldens["fwd_batch.logits"])

    def test_params_round_trip(self, params: Params, config: ModelConfig):
        out = Transformer(config, params).params()
        assert jax.tree.structure(out) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, out, params)

    def test_split_and_merge(self, gqa_model: Transformer):
        graph, state = nnx.split(gqa_model)
        merged = nnx.merge(graph, state)
        assert merged.config == gqa_model.config
        jax.tree.map(np.testing.assert_array_equal, merged.params(), gqa_model.params())

    def test_params_follow_the_variables(self, params: Params, config: ModelConfig):
        model = Transformer(config, params)
        model.final_norm[...] = model.final_norm[...] * 2
        np.testing.assert_array_equal(model.params()["final_norm"], params["final_norm"] * 2)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_random_weights_have_the_shapes_of_the_spec_tree(self, gqa_config: ModelConfig, dtype: str):
        def build():
            return Transformer(gqa_config, rngs=nnx.Rngs(3), dtype=dtype).params()

        specs = spec_tree(gqa_config)
        expected = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs, is_leaf=is_spec)
        assert jax.eval_shape(build) == expected

    def test_rngs_decide_the_weights(self, gqa_config: ModelConfig):
        @jax.jit
        def embedding(key: jax.Array) -> jax.Array:
            return Transformer(gqa_config, rngs=nnx.Rngs(key)).params()["embed"]

        first, again, other = (embedding(jax.random.key(seed)) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert (np.asarray(first) != np.asarray(other)).any()


@pytest.mark.parametrize("shape", ["llada-8b", "dream-7b", "llada-moe-7b"])
@pytest.mark.slow
def test_wanted_rows_are_those_of_all_rows_for_less_work(shape: str):
    config = small(shape)
    params = init_params(config, jax.random.key(0), "float32")
    tokens, rows, _ = lay_out([np.arange(20), np.arange(30)], config)
    wanted = np.array([45, 3, 3, 19, 20, 8])
    live = np.array([True, True, True, True, True, False])

    @jax.jit
    def everything(params: Params) -> jax.Array:
        return forward(params, config, tokens, rows)

    @jax.jit
    def some(params: Params) -> jax.Array:
        return forward_wanted(params, config, tokens, rows, Wanted(jnp.asarray(wanted), jnp.asarray(live)))

    actual = np.asarray(some(params))
    close(actual[live], np.asarray(everything(params))[wanted[live]])
    assert np.isfinite(actual).all()
    costs = [f.lower(params).compile().cost_analysis() for f in (some, everything)]
    narrow, whole = (cost["flops"] for cost in costs if cost is not None)
    assert narrow < 1.7 * whole  # XLA counts a loop's layers once: another whole layer would double that
