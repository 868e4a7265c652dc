"""A decoder over explicit rows and keys in NumPy float64, in the Dream (Qwen2) and LLaDA layouts.

Keys are kept before rotation and rotated again in every forward, so positions belong to the call, not to the
cache. Nothing here is shared with the package.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from safetensors.numpy import load_file

DREAM_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
LLADA_LAYER = {
    "attn_norm": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "attn_out",
    "ffn_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}


class Model(NamedTuple):
    """Weights in float64, `[out, in]`; a layer holds "q", "q_bias" (zero where there is none) and so on."""

    embed: Float[np.ndarray, "vocab hidden"]
    layers: list[dict[str, np.ndarray]]
    norm: Float[np.ndarray, "hidden"]
    head: Float[np.ndarray, "vocab hidden"]
    heads: int
    kv_heads: int
    theta: float
    eps: float

    @property
    def head_dim(self) -> int:
        return len(self.layers[0]["q"]) // self.heads


class Cache(NamedTuple):
    """Unrotated keys, and values."""

    k: Float[np.ndarray, "layers rows kv_heads head_dim"]
    v: Float[np.ndarray, "layers rows kv_heads head_dim"]

    @property
    def rows(self) -> int:
        return self.k.shape[1]

    def take(self, rows: slice | Int[np.ndarray, "some"]) -> "Cache":
        return Cache(self.k[:, rows], self.v[:, rows])

    def take_per_head(self, rows: Int[np.ndarray, "layers kv_heads some"]) -> "Cache":
        """Other rows for each layer and key-value head."""
        index = rows.swapaxes(1, 2)[..., None]
        return Cache(np.take_along_axis(self.k, index, axis=1), np.take_along_axis(self.v, index, axis=1))


def joined(parts: list[Cache]) -> Cache:
    """The rows of several caches one behind another."""
    return Cache(*(np.concatenate(tensors, axis=1) for tensors in zip(*parts, strict=True)))


class Output(NamedTuple):
    """What one forward gives: `cache` holds all keys, `attention` only the rows asked for."""

    logits: Float[np.ndarray, "rows vocab"]
    cache: Cache
    attention: Float[np.ndarray, "layers heads watched keys"]


def load(directory: Path) -> Model:
    """Read `config.json` and `model.safetensors`."""
    config = json.loads((directory / "config.json").read_text())
    return model_of(config, load_file(directory / "model.safetensors"))


def model_of(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Model:
    """The model of a `config.json` and of weights under their public names."""
    if config["model_type"] == "llada":
        root, blocks, names = "model.transformer.", "blocks", LLADA_LAYER
        embed, norm, head, tied = "wte", "ln_f", "model.transformer.ff_out.weight", "weight_tying"
        depth, heads, kv_heads = (config[name] for name in ("n_layers", "n_heads", "n_kv_heads"))
    else:
        root, blocks, names = "model.", "layers", DREAM_LAYER
        embed, norm, head, tied = "embed_tokens", "norm", "lm_head.weight", "tie_word_embeddings"
        depth, heads, kv_heads = (
            config[name] for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        )
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    table = weights[f"{root}{embed}.weight"]
    return Model(
        embed=table,
        layers=[_layer(weights, f"{root}{blocks}.{i}.", names) for i in range(depth)],
        norm=weights[f"{root}{norm}.weight"],
        head=table if config[tied] else weights[head],
        heads=heads,
        kv_heads=kv_heads,
        theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
    )


def _layer(weights: dict[str, np.ndarray], root: str, names: dict[str, str]) -> dict[str, np.ndarray]:
    layer = {ours: weights[f"{root}{theirs}.weight"] for ours, theirs in names.items()}
    biases = {f"{n}_bias": weights.get(f"{root}{names[n]}.bias", np.zeros(len(layer[n]))) for n in "qkv"}
    return layer | biases


def forward(
    model: Model,
    tokens: Int[np.ndarray, "rows"],
    positions: Int[np.ndarray, "keys"],
    mask: Bool[np.ndarray, "rows keys"] | None = None,
    cache: Cache | None = None,
    slots: Int[np.ndarray, "rows"] | None = None,
    watch: Int[np.ndarray, "watched"] | None = None,
) -> Output:
    """Evaluate `tokens` as the keys `slots` (without: the last ones) over the rows of `cache` in front.

    Rows that the cache already has there are replaced. Without a mask every row sees every key. `watch` are
    the rows whose attention probabilities are returned.
    """
    slots = np.arange(len(positions) - len(tokens), len(positions)) if slots is None else slots
    mask = np.ones((len(tokens), len(positions)), bool) if mask is None else mask
    watch = np.zeros(0, int) if watch is None else watch
    shape = (len(model.layers), len(positions), model.kv_heads, model.head_dim)
    k, v = np.zeros(shape), np.zeros(shape)
    if cache is not None:
        k[:, : cache.rows], v[:, : cache.rows] = cache
    attention = []
    h = model.embed[tokens]
    for i, layer in enumerate(model.layers):
        x = _norm(h, layer["attn_norm"], model.eps)
        q = _heads(x, layer, "q", model.heads)
        k[i, slots], v[i, slots] = (_heads(x, layer, n, model.kv_heads) for n in "kv")
        p = _probabilities(_rotated(q, positions[slots], model), _rotated(k[i], positions, model), mask)
        attention.append(p[:, watch])
        values = np.repeat(v[i], model.heads // model.kv_heads, axis=1).swapaxes(0, 1)
        h = h + (p @ values).swapaxes(0, 1).reshape(len(tokens), -1) @ layer["o"].T
        x = _norm(h, layer["ffn_norm"], model.eps)
        gate = x @ layer["gate"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ layer["up"].T)) @ layer["down"].T
    return Output(_norm(h, model.norm, model.eps) @ model.head.T, Cache(k, v), np.stack(attention))


def _norm(x: Float[np.ndarray, "rows hidden"], weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _heads(
    x: Float[np.ndarray, "rows hidden"], layer: dict[str, np.ndarray], name: str, heads: int
) -> Float[np.ndarray, "rows heads head_dim"]:
    return (x @ layer[name].T + layer[f"{name}_bias"]).reshape(len(x), heads, -1)


def _rotated(
    x: Float[np.ndarray, "rows heads head_dim"], positions: Int[np.ndarray, "rows"], model: Model
) -> Float[np.ndarray, "rows heads head_dim"]:
    half = model.head_dim // 2
    angle = (positions[:, None] * model.theta ** (-np.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _probabilities(
    q: Float[np.ndarray, "rows heads head_dim"],
    k: Float[np.ndarray, "keys kv_heads head_dim"],
    mask: Bool[np.ndarray, "rows keys"],
) -> Float[np.ndarray, "heads rows keys"]:
    shared = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = q.swapaxes(0, 1) @ shared.transpose(1, 2, 0) / np.sqrt(q.shape[-1])
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def log_softmax(logits: Float[np.ndarray, "... vocab"]) -> Float[np.ndarray, "... vocab"]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
