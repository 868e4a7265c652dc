"""Qwen3 once more, from its tensors by their published names: NumPy float64, nothing shared with jdllm.

With blocks and experts it is SDAR-MoE. Source: modeling_qwen3.py, configuration_qwen3.py and the experts of
modeling_qwen3_moe.py of transformers.
"""

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]

VALUES: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 90,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 40,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 40960,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 96,
}
"""The keys of a published `config.json`, for a small model whose heads together are wider than its rows."""

SDAR_MOE: dict[str, Any] = {
    "architectures": ["SDARMoeForCausalLM"],
    "block_size": 4,
    "decoder_sparse_step": 1,
    "mask_token_id": 95,
    "mlp_only_layers": [1],
    "model_type": "sdar_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
"""What SDAR-MoE has beside these keys."""


def random_tensors(values: dict[str, Any], seed: int) -> Tensors:
    """A checkpoint's tensors in f32, large enough that every branch counts; norms are around one."""
    rng = np.random.default_rng(seed)
    hidden, head_dim = values["hidden_size"], values["head_dim"]
    q_size, kv_size = (values[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (values["vocab_size"], hidden)}
    for layer in range(values["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (q_size, hidden),
                "self_attn.k_proj": (kv_size, hidden),
                "self_attn.v_proj": (kv_size, hidden),
                "self_attn.q_norm": (head_dim,),
                "self_attn.k_norm": (head_dim,),
                "self_attn.o_proj": (hidden, q_size),
                "post_attention_layernorm": (hidden,),
                **_feed_forward_shapes(values, layer),
            }.items()
        }
    shapes["model.norm.weight"] = (hidden,)
    if not values["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (values["vocab_size"], hidden)
    return {
        name: rng.normal(float(len(shape) == 1), 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def _feed_forward_shapes(values: dict[str, Any], layer: int) -> dict[str, tuple[int, int]]:
    """Of a dense layer, or of all experts and their router."""
    hidden, width, parts = values["hidden_size"], values["intermediate_size"], ["mlp."]
    router = {}
    if layer not in values.get("mlp_only_layers", [layer]):
        experts, width = values["num_experts"], values["moe_intermediate_size"]
        parts = [f"mlp.experts.{n}." for n in range(experts)]
        router = {"mlp.gate": (experts, hidden)}
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return router | {part + name: shape for part in parts for name, shape in shapes.items()}


def logits(tensors: Tensors, values: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """float64 `[length, vocab]` of ids `[length]`; a window, where there is one, is that of all layers."""
    weights = {name.removesuffix(".weight"): np.asarray(t, np.float64) for name, t in tensors.items()}
    heads, groups = values["num_attention_heads"], values["num_key_value_heads"]
    age = np.arange(len(ids))[:, None] - np.arange(len(ids))
    window = values["sliding_window"] if values["use_sliding_window"] else None
    visible = (age >= 0) & (age < (window or len(ids)))
    if "block_size" in values:
        block = np.arange(len(ids)) // values["block_size"]
        visible = block <= block[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + values["rms_norm_eps"]) * weights[name]

    h = weights["model.embed_tokens"][ids]
    for n in range(values["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        x = norm(h, layer + "input_layernorm")
        q, k, v = (
            (x @ weights[f"{attn}{name}_proj"].T).reshape(len(ids), count, values["head_dim"]).swapaxes(0, 1)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = (
            _rotated(norm(y, f"{attn}{name}_norm"), values["rope_theta"]) for y, name in ((q, "q"), (k, "k"))
        )
        k, v = (np.repeat(y, heads // groups, axis=0) for y in (k, v))
        scores = np.where(visible, q @ k.swapaxes(1, 2) / np.sqrt(values["head_dim"]), -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        o = p / p.sum(axis=-1, keepdims=True) @ v
        h = h + o.swapaxes(0, 1).reshape(len(ids), -1) @ weights[attn + "o_proj"].T
        x = norm(h, layer + "post_attention_layernorm")
        if mlp + "gate" in weights:
            h = h + np.stack([_by_experts(row, weights, mlp, values) for row in x])
        else:
            h = h + _gated(x, weights, mlp)
    head = "model.embed_tokens" if values["tie_word_embeddings"] else "lm_head"
    return norm(h, "model.norm") @ weights[head].T


def _gated(x: np.ndarray, weights: Tensors, mlp: str) -> np.ndarray:
    gate = x @ weights[mlp + "gate_proj"].T
    return (gate / (1 + np.exp(-gate)) * (x @ weights[mlp + "up_proj"].T)) @ weights[mlp + "down_proj"].T


def _by_experts(row: np.ndarray, weights: Tensors, mlp: str, values: dict[str, Any]) -> np.ndarray:
    """What the likeliest experts of one row add."""
    shares = np.exp(weights[mlp + "gate"] @ row)
    shares = shares / shares.sum()
    chosen = np.argsort(-shares, kind="stable")[: values["num_experts_per_tok"]]
    total = shares[chosen].sum() if values["norm_topk_prob"] else 1.0
    return np.sum([shares[n] / total * _gated(row, weights, f"{mlp}experts.{n}.") for n in chosen], axis=0)


def _rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Rows `[heads, length, head_dim]`, the two halves of a head as the parts of complex numbers."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.outer(np.arange(x.shape[1]), theta ** (-np.arange(half) / half)))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)
