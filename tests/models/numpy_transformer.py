"""The transformer once more: one unpadded sequence, full attention, NumPy float64, nothing shared."""

import numpy as np

from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params


def logits(params: Params, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """float64 `[length, vocab]` of ids `[length]`, with the default rotary embedding."""
    h = _f64(params["embed"])[tokens]
    for i in range(config.num_layers):
        layer = {name: _f64(leaf)[i] for name, leaf in params["layers"].items()}
        h = h + _attention(layer, config, _norm(h, layer["attn_norm"], config))
        x = _norm(h, layer["ffn_norm"], config)
        gate = x @ layer["gate"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ layer["up"].T)) @ layer["down"].T
    head = params["embed"] if config.tied_head else params["head"]
    return _norm(h, _f64(params["final_norm"]), config) @ _f64(head).T


def _f64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def _norm(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * weight


def _attention(layer: dict[str, np.ndarray], config: ModelConfig, x: np.ndarray) -> np.ndarray:
    length = len(x)
    q, k, v = (x @ layer[name].T for name in "qkv")
    if config.rope.query_beta:
        periods = np.arange(length) // config.rope.original_positions
        q = q * (1 + config.rope.query_beta * np.log(1 + periods))[:, None]
    out = []
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        mine, theirs = (slice(n * config.head_dim, (n + 1) * config.head_dim) for n in (head, shared))
        scores = _rotate(q[:, mine], config) @ _rotate(k[:, theirs], config).T / np.sqrt(config.head_dim)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, theirs])
    return np.stack(out, axis=1).reshape(length, -1) @ layer["o"].T


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    half = config.head_dim // 2
    angle = np.arange(len(x))[:, None] * config.rope.theta ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1
    )
