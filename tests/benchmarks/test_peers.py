"""The peers compute what ours computes: another model would be no comparison."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peers import jax_step
from benchmarks.shapes import SHAPES
from jdllm.execution.module import Transformer
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, init_params
from tests.benchmarks.shapes import MASK_ID, small

ROWS, MASKED = 24, np.arange(12, 24)
TRANSFERRED = 3


def expected_tokens(params: Params, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """`tokens` after the surest `TRANSFERRED` of `MASKED` have been committed, by the model's own logits."""
    logits = np.asarray(Transformer(config, params)(jnp.asarray(tokens[None]))[0], np.float64)
    if config.logits_shift:
        logits = np.concatenate([logits[:1], logits[:-1]])
    best = logits[MASKED].max(axis=1)
    confidence = -np.log(np.exp(logits[MASKED] - best[:, None]).sum(axis=1))
    surest = MASKED[np.argsort(-confidence)[:TRANSFERRED]]
    after = tokens.copy()
    after[surest] = logits[surest].argmax(axis=1)
    return after


@pytest.fixture(params=SHAPES)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return small(request.param)


@pytest.fixture
def params(config: ModelConfig) -> Params:
    """Weights large enough for rows to be of many minds, and none of them sure to the last bit."""
    return jax.tree.map(lambda x: 4 * x, init_params(config, jax.random.key(1), "float32"))


@pytest.fixture
def tokens(config: ModelConfig) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 80, ROWS)
    tokens[MASKED] = MASK_ID
    return tokens


def torch_weights(params: Params, config: ModelConfig) -> Any:
    """The same weights as `benchmarks.peers.torch_model` keeps them."""
    import torch  # pyright: ignore[reportMissingImports]

    from benchmarks.peers.torch_model import Weights

    def join(layer: dict[str, np.ndarray], names: tuple[str, ...], axis: int = 0) -> np.ndarray:
        return np.concatenate([layer.pop(name) for name in names], axis=axis)

    layers = []
    for index in range(config.num_layers):
        layer = {name: np.asarray(leaf[index]) for name, leaf in params["layers"].items()}
        layer["qkv"] = join(layer, ("q", "k", "v"))
        if config.qkv_bias:
            layer["qkv_bias"] = join(layer, ("q_bias", "k_bias", "v_bias"))
        if config.moe is None:
            layer["gate_up"] = join(layer, ("gate", "up"))
        else:
            layer["gate_up"] = join(layer, ("experts_gate", "experts_up"), axis=-1)
            layer["down"] = layer.pop("experts_down")
        layers.append({name: torch.tensor(leaf) for name, leaf in layer.items()})
    embed, norm, head = (torch.tensor(np.asarray(params[n])) for n in ("embed", "final_norm", "head"))
    return Weights(embed, layers, norm, head)


@pytest.mark.parametrize("form", ["compiled", "eager"])
def test_torch_commits_what_the_model_says(
    params: Params, config: ModelConfig, tokens: np.ndarray, form: str
):
    torch = pytest.importorskip("torch")
    from benchmarks.peers.torch_model import BACKENDS, Attention, compiled_step, eager_step

    weights, masked = torch_weights(params, config), torch.tensor(MASKED)
    if form == "eager":
        step = eager_step(weights, config, masked, TRANSFERRED)
    else:
        attention = Attention(next(iter(BACKENDS)), repeat=False)
        step = compiled_step(weights, config, masked, TRANSFERRED, attention, compiled=lambda f: f)
    after = step(torch.tensor(tokens)).numpy()
    np.testing.assert_array_equal(after, expected_tokens(params, config, tokens))


@pytest.mark.slow
def test_jax_commits_what_the_model_says(params: Params, config: ModelConfig, tokens: np.ndarray):
    args = params, config, jnp.asarray(tokens), jnp.asarray(MASKED), TRANSFERRED, "xla"
    if config.moe is not None:
        with pytest.raises(NotImplementedError, match="dense"):
            jax_step.step(*args)
        return
    np.testing.assert_array_equal(jax_step.step(*args), expected_tokens(params, config, tokens))
