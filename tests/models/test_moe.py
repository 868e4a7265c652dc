import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.shapes import SHAPES
from jdllm.checkpoints.loading import load_params
from jdllm.chunks import ChunkConfig
from jdllm.execution.transformer import embed, forward, packed_ranges
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig, MoeConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.layer import Layer
from jdllm.models.moe import Experts, moe_ffn, route
from jdllm.models.weights import Params, abstract_params, init_params, layer_runs
from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.planning.aot import compile_for
from tests.helpers import Golden
from tests.models.layer_by_layer import layers_in_order

GOLDEN = Golden("llada_moe")
CONFIG = config_from_hf(GOLDEN.directory)
HIDDEN, FFN, EXPERTS, LAYERS, TOP_K = 16, 12, 6, 3, 3
MOE = MoeConfig(EXPERTS, TOP_K, FFN)


@pytest.fixture(scope="module")
def weights() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    shapes = {"gate": (HIDDEN, FFN), "up": (HIDDEN, FFN), "down": (FFN, HIDDEN)}
    stacks = {name: rng.standard_normal((LAYERS * EXPERTS, *shape)) for name, shape in shapes.items()}
    stacks |= {"router": rng.standard_normal((EXPERTS, HIDDEN)), "bias": rng.uniform(-0.3, 0.3, EXPERTS)}
    return {name: jnp.asarray(value, jnp.float32) for name, value in stacks.items()}


def token_by_token(x: np.ndarray, weights: dict[str, jax.Array], biased: bool, place: int) -> np.ndarray:
    """The published layer, one token and one expert after the other, in f64."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    out = np.zeros_like(x, np.float64)
    for token, row in enumerate(x.astype(np.float64)):
        scores = np.exp(w["router"] @ row)
        scores = scores / scores.sum() + (w["bias"] if biased else 0)
        for expert in np.argsort(-scores, kind="stable")[:TOP_K]:
            at = place * EXPERTS + expert
            gate = row @ w["gate"][at]
            out[token] += scores[expert] * (gate / (1 + np.exp(-gate)) * (row @ w["up"][at])) @ w["down"][at]
    return out


@jax.jit
def layer(x: jax.Array, weights: dict[str, jax.Array], bias: jax.Array | None, place: int) -> jax.Array:
    experts = Experts(weights["gate"], weights["up"], weights["down"], 0, EXPERTS).of_layer(place)
    return moe_ffn(x, weights["router"], bias, experts, MOE, grouped_matmul)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("rows", [1, 50])
def test_a_layer_is_the_weighted_sum_of_each_rows_experts(weights, biased, place, rows):
    x = np.random.default_rng(rows).standard_normal((rows, HIDDEN), np.float32)
    bias = weights["bias"] if biased else None
    actual = layer(jnp.asarray(x), weights, bias, place)
    expected = token_by_token(x, weights, biased, place)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_the_bias_changes_the_choice_and_the_weights(weights):
    x = np.random.default_rng(0).standard_normal((40, HIDDEN), np.float32)
    every = dataclasses.replace(MOE, top_k=EXPERTS)
    plain, chosen = route(jnp.asarray(x), weights["router"], None, every)
    biased, chosen_biased = route(jnp.asarray(x), weights["router"], weights["bias"], every)
    assert not np.array_equal(chosen[:, :TOP_K], chosen_biased[:, :TOP_K])
    by_expert = [
        np.take_along_axis(np.asarray(w), np.argsort(c, axis=1), 1)
        for w, c in ((plain, chosen), (biased, chosen_biased))
    ]
    np.testing.assert_allclose(by_expert[1] - by_expert[0], np.tile(weights["bias"], (40, 1)), atol=1e-6)
    assert np.all(np.diff(biased, axis=1) <= 0)


def test_equal_experts_are_chosen_from_the_lowest():
    four = dataclasses.replace(MOE, top_k=4)
    weights, chosen = route(jnp.ones((2, HIDDEN)), jnp.zeros((EXPERTS, HIDDEN)), None, four)
    np.testing.assert_array_equal(chosen, [[0, 1, 2, 3]] * 2)
    np.testing.assert_allclose(weights, 1 / EXPERTS, rtol=1e-6)


def test_decisions_are_f32_whatever_the_weights_are(weights):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, HIDDEN)), jnp.bfloat16)
    router = jnp.asarray(weights["router"], jnp.bfloat16)
    probabilities, chosen = route(x, router, None, MOE)
    exact, same = route(x.astype(jnp.float32), router.astype(jnp.float32), None, MOE)
    assert probabilities.dtype == jnp.float32
    np.testing.assert_array_equal(chosen, same)
    np.testing.assert_allclose(probabilities, exact, rtol=1e-5)


# Groups, and weights of other sizes

GROUPED = MoeConfig(
    experts=16,
    top_k=3,
    expert_size=FFN,
    expert_bias=True,
    score="sigmoid",
    bias_weighs=False,
    groups=4,
    kept_groups=2,
    normalized=True,
    scale=2.5,
)


def routed(row_logits: np.ndarray, bias: np.ndarray, moe: MoeConfig) -> tuple[np.ndarray, np.ndarray]:
    """The published rule for one row in f64, by sorting: of equal groups and experts the first ones."""
    scores = 1 / (1 + np.exp(-row_logits.astype(np.float64)))
    biased = scores + bias
    groups = np.split(np.arange(moe.experts), moe.groups)
    best_two = [np.sort(biased[group])[-2:].sum() for group in groups]
    kept = np.argsort(-np.array(best_two), kind="stable")[: moe.kept_groups]
    allowed = np.sort(np.concatenate([groups[n] for n in kept]))
    chosen = allowed[np.argsort(-biased[allowed], kind="stable")[: moe.top_k]]
    return scores[chosen] / (scores[chosen].sum() + 1e-20) * moe.scale, chosen


def assert_routed(row_logits: np.ndarray, bias: np.ndarray, moe: MoeConfig) -> None:
    identity = jnp.eye(moe.experts)
    found = route(jnp.asarray(row_logits), identity, jnp.asarray(bias), moe)
    expected = [routed(row, bias, moe) for row in row_logits]
    np.testing.assert_array_equal(found[1], [chosen for _, chosen in expected])
    np.testing.assert_allclose(found[0], [weights for weights, _ in expected], rtol=1e-5)


@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (8, 3), (4, 4), (1, 1)])
def test_experts_of_the_best_groups_are_chosen(groups, kept):
    rng = np.random.default_rng(groups)
    row_logits = rng.standard_normal((200, 16)).astype(np.float32)
    bias = rng.uniform(-0.5, 0.5, 16).astype(np.float32)
    assert_routed(row_logits, bias, dataclasses.replace(GROUPED, groups=groups, kept_groups=kept))


def test_a_group_that_is_left_out_stays_out_whatever_the_bias():
    """The best groups are the first two, and their biased scores are all below zero."""
    bias = np.repeat([-1.5, -1.0, -2.0, -3.0], 4).astype(np.float32)
    row_logits = np.tile([3.0, 2.0, -4.0, -5.0], (1, 4)).astype(np.float32)
    every = dataclasses.replace(GROUPED, top_k=8)
    assert_routed(row_logits, bias, every)
    _, chosen = route(jnp.asarray(row_logits), jnp.eye(16), jnp.asarray(bias), every)
    assert set(np.asarray(chosen)[0].tolist()) == set(range(8))


def test_of_equal_groups_and_experts_the_first_are_chosen():
    """Scores of four values only, of which no two pairs have one sum: most rows have ties of both kinds."""
    rng = np.random.default_rng(0)
    row_logits = rng.choice(np.array([-3, -1, 0, 2], np.float32), (300, 16))
    assert_routed(row_logits, np.zeros(16, np.float32), GROUPED)


def test_a_shared_expert_is_added_as_it_is(weights):
    """Against the same layer without it, and the gated products in f64."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((9, HIDDEN)).astype(np.float32)
    names = {"shared_gate": (FFN, HIDDEN), "shared_up": (FFN, HIDDEN), "shared_down": (HIDDEN, FFN)}
    shared = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}
    experts = Experts(weights["gate"], weights["up"], weights["down"], 0, EXPERTS)
    leaves = shared | {"ffn_norm": jnp.ones(HIDDEN), "router": weights["router"], "experts": experts}
    without, having = (
        Layer(leaves, dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, shared_size=size)))
        for size in (0, FFN)
    )
    normed = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    gate, up, down = (shared[name].astype(np.float64) for name in names)
    inner = normed @ gate.T
    expected = (inner / (1 + np.exp(-inner)) * (normed @ up.T)) @ down.T
    added = np.asarray(having.feed_forward(jnp.asarray(x))) - np.asarray(without.feed_forward(jnp.asarray(x)))
    np.testing.assert_allclose(added, expected, rtol=1e-3, atol=1e-3)


# Whole models


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, Rows]:
    rng = np.random.default_rng(3)
    length = 49
    ends = np.full(length, length, np.int32)
    return rng.integers(0, 500, length), Rows(np.arange(length), np.zeros(length, np.int32), ends)


@pytest.mark.slow
def test_chunks_of_rows_change_no_bit(batch):
    params, (tokens, rows) = load_params(GOLDEN.directory, CONFIG, "float32"), batch
    whole, chunked = (
        jax.jit(functools.partial(forward, config=CONFIG, chunks=ChunkConfig(ffn=count)))(
            params, tokens=tokens, rows=rows
        )
        for count in (1, 2)
    )
    np.testing.assert_array_equal(chunked, whole)


@functools.partial(jax.jit, static_argnames="config")
def one_by_one(params: Params, config: ModelConfig, tokens: np.ndarray, rows: Rows) -> jax.Array:
    h, sees = embed(params, tokens), packed_ranges(config, rows)
    for weights in layers_in_order(params, config):
        h, _ = Layer(weights, config).apply(h, sees)
    return h


def mixed(has_experts: list[int]) -> dict:
    values = {"num_hidden_layers": len(has_experts), "moe_layer_freq": has_experts}
    return GOLDEN.json("config") | values | {"moe_router_enable_expert_bias": True}


@pytest.mark.parametrize(
    ("has_experts", "runs"),
    [
        ([1, 1, 1], [("layers", 0, 3)]),
        ([0, 1, 1], [("dense_layers", 0, 1), ("layers", 0, 2)]),
        ([1, 0, 1], [("layers", 0, 1), ("dense_layers", 0, 1), ("layers", 1, 2)]),
        ([0, 0, 0], [("layers", 0, 3)]),
    ],
)
def test_runs_of_like_layers(has_experts, runs):
    assert layer_runs(config_from_hf(mixed(has_experts))) == runs


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory) -> tuple[ModelConfig, Params, dict[str, np.ndarray]]:
    """Experts, no experts, experts: the model, its weights and the stored ones."""
    path = tmp_path_factory.mktemp("mixed") / "random"
    write_random_checkpoint(path, mixed([1, 0, 1]))
    config = config_from_hf(path)
    return config, load_params(path, config, "float32"), load_file(path / "model.safetensors")


def test_each_layer_has_its_stored_weights(interleaved):
    config, params, stored = interleaved
    routers = {name for name in stored if name.endswith("mlp.gate.weight")}
    assert routers == {f"model.layers.{i}.mlp.gate.weight" for i in (0, 2)}
    for i, weights in enumerate(layers_in_order(params, config)):
        name = f"model.layers.{i}."
        np.testing.assert_array_equal(weights["q_norm"], stored[name + "self_attn.q_norm.weight"])
        np.testing.assert_array_equal(weights["q"], stored[name + "self_attn.q_proj.weight"])
        if i == 1:
            np.testing.assert_array_equal(weights["down"], stored[name + "mlp.down_proj.weight"])
        else:
            np.testing.assert_array_equal(weights["expert_bias"], stored[name + "mlp.expert_bias"])
            down = stored[name + "mlp.experts.7.down_proj.weight"]
            np.testing.assert_array_equal(weights["experts"].down[weights["experts"].first + 7], down.T)


@pytest.mark.slow
def test_layers_run_in_their_order(interleaved, batch):
    config, params, _ = interleaved
    # Random weights of the published deviation make layers that hardly change a row: make them count.
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 2 else leaf, params)
    actual = jax.jit(forward, static_argnums=1)(params, config, *batch)
    np.testing.assert_allclose(actual, one_by_one(params, config, *batch), rtol=1e-4, atol=1e-4)


def test_random_weights_have_both_stacks():
    config = config_from_hf(mixed([1, 0, 1]))
    drawn = jax.eval_shape(lambda: init_params(config, jax.random.key(0), "bfloat16"))
    assert drawn["layers"]["experts_down"].shape == (2, 8, 28, 64)
    assert drawn["dense_layers"]["down"].shape == (1, 64, 160)
    assert {leaf.dtype for leaf in jax.tree.leaves(drawn)} == {jnp.dtype("bfloat16")}


@pytest.mark.aot
@pytest.mark.parametrize("rows", [1024, 8192])
def test_no_layer_of_experts_is_copied_on_a_card(rows):
    """With the kernels of an H200. A layer's experts are 768 MiB, more than the temporaries may be."""
    config = SHAPES["llada-moe-7b"]
    ints = np.zeros(rows, np.int32)
    executable = compile_for(
        "h200",
        lambda params, tokens, at: forward(params, config, tokens, at),
        abstract_params(config, "bfloat16"),
        ints,
        Rows(ints, ints, ints),
    )
    analysis = executable.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < rows * 84 * 1024 + (64 << 20)
