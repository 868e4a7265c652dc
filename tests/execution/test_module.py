"""The Flax module against recorded outputs, a NumPy oracle in float64, and the transformer of executables."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdllm import ConfigError, Transformer
from jdllm.checkpoints.conversion import to_native
from jdllm.execution.transformer import forward, logits
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.sharding import AXES, shardings
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params, is_spec, spec_tree
from tests.helpers import ROOT, Golden
from tests.models import numpy_transformer

FAMILIES = ["llada", "dream", "fast_dllm_v2", "llada_moe", "llama31_rope", "mistral_swa", "qwen2"]
RULES = {"heads": "model", "kv_heads": "model", "ffn": "model", "vocab": "model"}

close = functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-4)
evaluate = nnx.jit(lambda model, tokens, mask: model(tokens, padding_mask=mask))


def load(family: str) -> Transformer:
    return Transformer.from_pretrained(Golden(family).directory, dtype="float32")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Transformer:
    return load(family)


def drawn(config: ModelConfig, seed: int = 0) -> Transformer:
    """Weights large enough that every branch counts, norm weights other than one."""
    rng = np.random.default_rng(seed)

    def draw(spec) -> jax.Array:
        return jnp.asarray(rng.normal(1.0 if spec.init_std == 0 else 0.0, 0.2, spec.shape), jnp.float32)

    return Transformer(config, jax.tree.map(draw, spec_tree(config), is_leaf=is_spec))


@pytest.fixture(scope="module")
def dense_config(config: ModelConfig) -> ModelConfig:
    """Shared key-value heads, a tied head, an odd number of layers."""
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
    )


@pytest.fixture(scope="module")
def mixed_config() -> ModelConfig:
    """Experts in the layer between two others."""
    config = config_from_hf(Golden("llada_moe").directory)
    assert config.moe is not None
    return dataclasses.replace(config, num_layers=3, moe=dataclasses.replace(config.moe, dense_layers=(0, 2)))


def packed(params: Params, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits of one sequence by the transformer that executables run."""
    rows = Rows(np.arange(len(tokens)), *key_ranges(config, 0, len(tokens)))
    run = jax.jit(lambda params: logits(params, config, forward(params, config, jnp.asarray(tokens), rows)))
    return np.asarray(run(params))


class TestLogits:
    def test_recorded_batch(self, family: str, model: Transformer):
        tensors = Golden(family).tensors()
        actual = evaluate(model, jnp.asarray(tensors["fwd_batch.input_ids"]), None)
        assert actual.dtype == jnp.float32
        close(actual, tensors["fwd_batch.logits"])

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_recorded_padding(self, side: str, params: Params, config: ModelConfig, goldens):
        real = goldens[f"pad_{side}.attention_mask"].astype(bool)
        ids = jnp.asarray(goldens[f"pad_{side}.input_ids"])
        assert (~real).any()
        close(evaluate(Transformer(config, params), ids, real)[real], goldens[f"pad_{side}.logits"][real])

    def test_tokens_that_are_not_there_change_nothing(self, family: str, model: Transformer):
        """Before, within and behind a sequence, whatever their ids are."""
        ids = Golden(family).tensors()["fwd_batch.input_ids"][:2, :12]
        real = np.zeros((2, 20), bool)
        real[0, [2, 3, 4, 5, 9, 10, 11, 12, 13, 16, 17, 18]] = True
        real[1, :12] = True
        padded = np.random.default_rng(0).integers(model.config.vocab_size, size=real.shape)
        padded[real] = ids.reshape(-1)
        alone = np.asarray(evaluate(model, jnp.asarray(ids), None))
        close(evaluate(model, jnp.asarray(padded), real)[real], alone.reshape(-1, alone.shape[-1]))

    def test_a_sequence_of_padding_alone_leaves_numbers(self, params: Params, config: ModelConfig):
        out = evaluate(
            Transformer(config, params), jnp.zeros((2, 4), int), np.array([[0] * 4, [1] * 4], bool)
        )
        assert np.isfinite(out).all()

    def test_positions(self, params: Params, config: ModelConfig, goldens):
        """Rotary embeddings are relative: a common offset changes nothing, a gap does."""
        model, ids = Transformer(config, params), jnp.asarray(goldens["fwd_b1.input_ids"])
        run = nnx.jit(lambda model, positions: model(ids, positions=positions))
        place = jnp.arange(ids.shape[1])[None]
        close(run(model, place + 7), goldens["fwd_b1.logits"])
        assert np.abs(np.asarray(run(model, place * 2)) - goldens["fwd_b1.logits"]).max() > 0.01

    @pytest.mark.slow
    def test_layers_with_and_without_experts(self, mixed_config: ModelConfig):
        model, ids = drawn(mixed_config), np.random.default_rng(1).integers(500, size=(2, 9))
        actual = evaluate(model, jnp.asarray(ids), None)
        for row, tokens in zip(actual, ids, strict=True):
            close(row, packed(model.params(), mixed_config, tokens))


class TestParts:
    @pytest.mark.slow
    def test_hidden_states_layer_by_layer(self, config: ModelConfig, params: Params, goldens):
        model, ids = Transformer(config, params), goldens["fwd_b1.input_ids"]
        sees = model.sees(ids.shape)
        h = model.embed[ids]
        for number, layer in enumerate(model.layers):
            recorded = {
                name: goldens[f"fwd_b1.hidden.layer{number}{name}"] for name in (".attn_out", ".ff_out")
            }
            attended = layer.attention(h, sees)
            close(attended, recorded[".attn_out"])
            close(layer.feed_forward(h + attended), recorded[".ff_out"])
            h = layer(h, sees)
            close(h, goldens[f"fwd_b1.hidden.layer{number}"])
        close(model.logits(h), goldens["fwd_b1.logits"])

    def test_names_are_those_of_the_spec_tree(self, family: str, model: Transformer):
        state = nnx.to_flat_state(nnx.state(model, nnx.Param))
        expected = {
            tuple(key.key for key in path): spec
            for path, spec in jax.tree.leaves_with_path(spec_tree(model.config), is_leaf=is_spec)
        }
        parts = {"attention", "feed_forward", "experts"}
        found = {tuple(key for key in path if key not in parts): leaf for path, leaf in state}
        assert found.keys() == expected.keys()
        for path, leaf in found.items():
            assert leaf.get_metadata("out_sharding") == expected[path].axes
            assert leaf.shape == expected[path].shape
            assert set(expected[path].axes) <= set(AXES)
        assert hasattr(model.layers, "experts") == (family == "llada_moe")

    def test_layers_are_counted_in_the_model(self, mixed_config: ModelConfig):
        model = drawn(mixed_config)
        assert (model.layers.numbers, model.dense_layers.numbers) == ((1,), (0, 2))
        np.testing.assert_array_equal(model.layers[1].attention.q, model.params()["layers"]["q"][0])
        np.testing.assert_array_equal(
            model.dense_layers[2].feed_forward.up, model.params()["dense_layers"]["up"][1]
        )
        with pytest.raises(IndexError, match="dense_layers has no layer 1: it has 0, 2"):
            model.dense_layers[1]

    def test_weights_exist_once(self, params: Params, config: ModelConfig):
        """What `LLM` takes are the arrays of the parameters, and these are what was loaded."""
        given = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), params)
        taken = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), Transformer(config, params).params())
        assert given == taken


def loss_of(model: Transformer, tokens: np.ndarray, weight: np.ndarray) -> jax.Array:
    return jnp.sum(jax.nn.log_softmax(model(jnp.asarray(tokens)), axis=-1) * weight)


class TestGradient:
    def test_against_finite_differences_in_float64(self, dense_config: ModelConfig):
        """Of every leaf, along a random direction."""
        model, rng = drawn(dense_config), np.random.default_rng(5)
        tokens, weight = rng.integers(90, size=11), rng.normal(size=(11, 90))
        grads = nnx.jit(nnx.grad(loss_of))(model, tokens[None], weight[None])
        params = model.params()
        leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), params))

        def loss(leaves: list[np.ndarray]) -> float:
            out = numpy_transformer.logits(jax.tree.unflatten(tree, leaves), dense_config, tokens)
            top = out.max(axis=1, keepdims=True)
            return float(np.sum((out - top - np.log(np.exp(out - top).sum(axis=1, keepdims=True))) * weight))

        found = jax.tree.leaves(Transformer(dense_config, params_of(grads, dense_config)).params())
        for i, grad in enumerate(found):
            direction, step = rng.normal(size=grad.shape), 1e-6
            moved = [[*leaves[:i], leaves[i] + sign * step * direction, *leaves[i + 1 :]] for sign in (1, -1)]
            ends = [loss(one) for one in moved]
            expected = (ends[0] - ends[1]) / (2 * step)
            assert abs(np.sum(np.asarray(grad) * direction) - expected) < 1e-3 * max(1, abs(expected))

    @pytest.mark.slow
    def test_of_experts_against_differences(self, mixed_config: ModelConfig):
        """Of the executables' transformer, whose products of experts have no gradient; float32."""
        model, rng = drawn(mixed_config), np.random.default_rng(6)
        tokens, weight = rng.integers(500, size=7), rng.normal(size=(7, mixed_config.vocab_size))
        grads = params_of(nnx.jit(nnx.grad(loss_of))(model, tokens[None], weight[None]), mixed_config)
        direction = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), model.params())
        for name in ("experts_gate", "experts_up", "experts_down"):
            direction["layers"][name] = rng.normal(size=direction["layers"][name].shape).astype(np.float32)

        def loss(step: float) -> float:
            moved = jax.tree.map(lambda x, d: x + step * d, model.params(), direction)
            out = packed(moved, mixed_config, tokens).astype(np.float64)
            top = out.max(axis=1, keepdims=True)
            return float(np.sum((out - top - np.log(np.exp(out - top).sum(axis=1, keepdims=True))) * weight))

        expected = (loss(1e-3) - loss(-1e-3)) / 2e-3
        actual = sum(
            float(np.sum(np.asarray(g) * d))
            for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
        )
        assert abs(expected) > 1
        assert abs(actual - expected) < 0.02 * abs(expected)

    def test_padding_has_no_part_in_it(self, dense_config: ModelConfig):
        """Not even where a sequence is padding alone."""
        model = drawn(dense_config)
        tokens, real = np.full((3, 6), 7), np.array([[1] * 6, [1, 1, 1, 1, 0, 0], [0] * 6], bool)

        def loss(model: Transformer, tokens: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(real[..., None], model(tokens, padding_mask=real), 0.0) ** 2)

        grad = nnx.jit(nnx.grad(loss))
        other = np.where(real, tokens, 50)
        first, second = (grad(model, jnp.asarray(ids)) for ids in (tokens, other))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), first, second)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(first))

    @pytest.mark.parametrize("shape", ["dense", pytest.param("mixed", marks=pytest.mark.slow)])
    def test_remat_changes_memory_only(self, shape: str, request: pytest.FixtureRequest):
        config = dataclasses.replace(request.getfixturevalue(f"{shape}_config"), intermediate_size=512)
        rng = np.random.default_rng(7)
        tokens, weight = rng.integers(90, size=(2, 64)), rng.normal(size=(2, 64, config.vocab_size))

        def compiled(model: Transformer, evaluate=loss_of):
            graph, state = nnx.split(model)

            def grads(state):
                return nnx.grad(evaluate)(nnx.merge(graph, state), tokens, weight)

            run = jax.jit(grads).lower(state).compile()
            needs = run.memory_analysis()
            assert needs is not None
            return run(state), needs.temp_size_in_bytes

        kept, kept_bytes = compiled(drawn(config))
        model = drawn(config)
        model.remat = True
        computed, computed_bytes = compiled(model)
        whole, _ = compiled(drawn(config), nnx.remat(loss_of))
        assert computed_bytes < kept_bytes
        for other in (computed, whole):
            jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-3, rtol=1e-4), other, kept)


def params_of(grads: nnx.State, config: ModelConfig) -> Params:
    """Gradients by the keys of the spec tree."""
    flat = {path[0:1] + path[-1:] if len(path) > 1 else path: leaf for path, leaf in nnx.to_flat_state(grads)}
    return jax.tree.map_with_path(
        lambda path, _: flat[tuple(key.key for key in path)].get_value(), spec_tree(config), is_leaf=is_spec
    )


class TestLoading:
    def test_a_native_checkpoint_gives_the_same(self, tmp_path: Path):
        to_native(Golden("llada_moe").directory, tmp_path / "native")
        native = Transformer.from_pretrained(tmp_path / "native", dtype="float32")
        jax.tree.map(np.testing.assert_array_equal, native.params(), load("llada_moe").params())

    def test_dtype(self):
        model = Transformer.from_pretrained(Golden("llada").directory, dtype="bfloat16")
        assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params())} == {"bfloat16"}
        assert model(jnp.zeros((1, 3), int)).dtype == jnp.float32

    def test_ids_of_the_tokenizer_are_known(self):
        from jdllm.demo import checkpoint_path

        config = Transformer.from_pretrained(checkpoint_path()).config
        assert (config.mask_id, config.token_limit) == (261, 262)


class TestSharding:
    @pytest.mark.slow
    def test_two_devices(self):
        """The same logits and gradients; each device has half of what is cut."""
        environment = os.environ | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
        }
        script = ROOT / "tests" / "execution" / "sharded_module.py"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", f"tests.execution.{script.stem}"],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (0, "as on one device\n"), done.stderr

    def test_axis_names_are_those_of_flax(self, dense_config: ModelConfig):
        from flax.linen import logical_axis_rules

        with logical_axis_rules(
            [*RULES.items(), *((name, None) for name in ("layers", "hidden", "head_dim"))]
        ):
            state = nnx.get_partition_spec(nnx.state(drawn(dense_config)))
        specs = {path: spec.get_value() for path, spec in nnx.to_flat_state(state)}
        assert specs["layers", "attention", "o"] == jax.P(None, None, "model")
        assert specs["embed",] == jax.P("model", None)

    @pytest.mark.parametrize(
        ("rules", "said"),
        [
            ({"head": "model"}, "no weight has an axis 'head': expected layers, vocab, hidden, heads"),
            ({"heads": "tensor"}, "the mesh has no axis 'tensor': expected model"),
            ({"heads": "model", "hidden": "model"}, "cut twice along 'model'"),
        ],
    )
    def test_rules_that_cannot_be(self, config: ModelConfig, rules: dict[str, str], said: str):
        with pytest.raises(ConfigError, match=said):
            shardings(config, jax.make_mesh((1,), ("model",)), rules)
