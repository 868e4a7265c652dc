"""The transformer once more: one unpadded sequence, NumPy float64, nothing shared."""

import numpy as np

from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from tests.rounding import rounded_as_stored


def logits(
    params: Params,
    config: ModelConfig,
    tokens: np.ndarray,
    *,
    sees: np.ndarray | None = None,
    stored: int = 0,
) -> np.ndarray:
    """float64 `[length, vocab]` of ids `[length]`, with the default rotary embedding.

    Arguments:
    - `sees`: bool `[length, length]`, which keys each row sees; all by default.
    - `stored`: keys and values of so many first rows are rounded as a pool in 8 bits stores them.
    """
    sees = np.ones((len(tokens), len(tokens)), bool) if sees is None else sees
    h = _f64(params["embed"])[tokens]
    for i in range(config.num_layers):
        layer = {name: _f64(leaf)[i] for name, leaf in params["layers"].items()}
        h = h + _attention(layer, config, _norm(h, layer["attn_norm"], config), sees, stored)
        x = _norm(h, layer["ffn_norm"], config)
        gate = x @ layer["gate"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ layer["up"].T)) @ layer["down"].T
    head = params["embed"] if config.tied_head else params["head"]
    return _norm(h, _f64(params["final_norm"]), config) @ _f64(head).T


def _f64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def _norm(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * weight


def _attention(
    layer: dict[str, np.ndarray], config: ModelConfig, x: np.ndarray, sees: np.ndarray, stored: int
) -> np.ndarray:
    length = len(x)
    q, k, v = (x @ layer[name].T for name in "qkv")
    if config.rope.query_beta:
        periods = np.arange(length) // config.rope.original_positions
        q = q * (1 + config.rope.query_beta * np.log(1 + periods))[:, None]

    def normed(name: str, rows: np.ndarray) -> np.ndarray:
        return _norm(rows, layer[f"{name}_norm"], config) if config.qk_norm else rows

    out = []
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        mine, theirs = (slice(n * config.head_dim, (n + 1) * config.head_dim) for n in (head, shared))
        keys, values = _rotate(normed("k", k[:, theirs]), config), v[:, theirs]
        keys, values = (np.concatenate([rounded_as_stored(x[:stored]), x[stored:]]) for x in (keys, values))
        scores = _rotate(normed("q", q[:, mine]), config) @ keys.T / np.sqrt(config.head_dim)
        scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out.append(weights / weights.sum(axis=-1, keepdims=True) @ values)
    return np.stack(out, axis=1).reshape(length, -1) @ layer["o"].T


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    half = config.head_dim // 2
    angle = np.arange(len(x))[:, None] * config.rope.theta ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1
    )
