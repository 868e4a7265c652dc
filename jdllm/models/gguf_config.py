"""The metadata of a GGUF file as the `config.json` of its model, which the family then checks.

Source: the converters of llama.cpp, which write these files, and `gguf.constants`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jdllm.errors import ConfigError
from jdllm.gguf_files import Gguf, GgufTensor, read_gguf
from jdllm.models.config import MOST_LAYERS
from jdllm.models.rotary import RopeConfig, inverse_frequencies

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by whose values the frequencies of the rotary embedding are divided."""

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_LLADA_KEYS = _KEYS | {
    "context_length": "max_sequence_length",
    "embedding_length": "d_model",
    "block_count": "n_layers",
    "feed_forward_length": "mlp_hidden_size",
    "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads",
}
_EXPERT_KEYS = _KEYS | {
    "feed_forward_length": "dense_intermediate_size",
    "expert_feed_forward_length": "expert_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
_LLADA_STATED = {
    "activation_type": "silu",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
}

_SIZES = ("attention.head_count", "embedding_length", "block_count")
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
_READ_APART = (*_SCALING, "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size")
_NEUTRAL: Mapping[str, Any] = {
    "expert_gating_func": 1,
    "expert_weights_scale": 1.0,
    "logit_scale": 1.0,
    "tensor_data_layout": "Meta AI original pth",
}
"""Values of keys that say what holds without them, beside 0 and nothing."""

_EXPECTED = {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0}
"""The only values of keys of which 0 says something else."""

_NO_EFFECT = ("rope.scaling.finetuned",)
_SCALINGS = ("none", "linear", "yarn")
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_USUAL_CONTEXT = 8192
_TOLERANCE = 1e-5


class GgufArchitecture(NamedTuple):
    """What llama.cpp calls an architecture, in the words of `config.json`.

    - `name`, `model_type`: `architectures` and `model_type` there.
    - `keys`: metadata behind the name of the architecture -> key.
    - `causal`: a row sees itself and those before it.
    - `shifted`: the logits of row j - 1 predict token j of a model that is not causal.
    - `paired`: the rows of each head of the query and key projections are in the order in which neighbours
      are rotated together; `config.json` is for halves.
    - `stated`: keys that no metadata tell.
    """

    name: str
    model_type: str
    keys: Mapping[str, str] = _KEYS
    causal: bool = True
    shifted: bool = False
    paired: bool = False
    stated: Mapping[str, Any] = {}


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", paired=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "dream": GgufArchitecture("DreamModel", "Dream", causal=False, shifted=True),
    "llada": GgufArchitecture(
        "LLaDAModelLM", "llada", _LLADA_KEYS, causal=False, paired=True, stated=_LLADA_STATED
    ),
    "llada-moe": GgufArchitecture("LLaDAMoEModelLM", "lladamoe", _EXPERT_KEYS, causal=False),
}
"""By `general.architecture`."""


def architecture_of(gguf: Gguf) -> GgufArchitecture:
    """The architecture of a model; `ConfigError` for one that jdllm does not run, and for no model."""
    kind = gguf.values.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{gguf.file} holds something else than a model: its general.type is {kind!r}")
    name = gguf.values.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{gguf.file} has the architecture {name!r}: of GGUF files jdllm runs {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def read_gguf_config(path: Path) -> dict[str, Any]:
    """What the `config.json` of a model would say.

    Arguments:
    - `path`: the GGUF file, or any file of a split.

    Returns a parsed `config.json`. Its `torch_dtype` is the type of the largest part of the matrices, and
    bfloat16 where these are quantised.

    Raises `CheckpointError` as `read_gguf` does, and `ConfigError` for an unknown architecture, and for
    metadata that are missing or ask for what jdllm does not follow.
    """
    gguf = read_gguf(path)
    architecture = architecture_of(gguf)
    own = _own_values(gguf)
    _refuse_others(gguf, architecture, own)
    keys = architecture.keys
    values = {key: own[name] for name, key in keys.items() if name in own}
    heads, hidden, _ = (_size(gguf, own, name) for name in _SIZES)
    values.setdefault(keys["attention.head_count_kv"], heads)
    values.setdefault("head_dim", hidden // heads)
    values.setdefault("rope_theta", 10000.0)
    for name, key in keys.items():
        if key not in values and not (name == "feed_forward_length" and "expert_count" in keys):
            raise ConfigError(f"{gguf.file} lacks {_prefix(gguf)}{name}")
    _check_head(gguf, own, values["head_dim"])
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{gguf.file} lacks the tensor token_embd.weight")
    tied = "output.weight" not in gguf.tensors
    values |= {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "torch_dtype": _dtype(gguf),
        **architecture.stated,
        **_token_ids(gguf.values, separate_turn=keys is _LLADA_KEYS),
    }
    values |= _rope_scaling(gguf, own, values["head_dim"])
    if keys is _LLADA_KEYS:
        return values | {"embedding_size": embedding.shape[0], "weight_tying": tied}
    values |= {"tie_word_embeddings": tied}
    return values | _expert_values(gguf, values) if keys is _EXPERT_KEYS else values


def _prefix(gguf: Gguf) -> str:
    return f"{gguf.values['general.architecture']}."


def _own_values(gguf: Gguf) -> dict[str, Any]:
    """The metadata of the architecture, without its name. Floats are f32: the shortest decimal that is."""
    prefix = _prefix(gguf)
    found = {key.removeprefix(prefix): x for key, x in gguf.values.items() if key.startswith(prefix)}
    return {key: float(str(np.float32(x))) if isinstance(x, float) else x for key, x in found.items()}


def _refuse_others(gguf: Gguf, architecture: GgufArchitecture, own: Mapping[str, Any]) -> None:
    """Refuse metadata that ask for what is not followed, by their names."""
    known = {*architecture.keys, *_READ_APART, *_NO_EFFECT, "attention.value_length", "rope.dimension_count"}
    expected = {"attention.causal": architecture.causal, **_EXPECTED}
    for key, value in own.items():
        wanted = expected.get(key, _NEUTRAL.get(key))
        if key not in known and value != wanted and (value or key in expected):
            raise ConfigError(f"{gguf.file} has {_prefix(gguf)}{key} {value!r}, which jdllm does not follow")
    shift = gguf.values.get("diffusion.shift_logits", architecture.shifted)
    if shift != architecture.shifted:
        raise ConfigError(
            f"{gguf.file} has diffusion.shift_logits {shift!r}, and jdllm's {architecture.name} does not"
        )


def _size(gguf: Gguf, own: Mapping[str, Any], name: str) -> int:
    value = own.get(name)
    if not isinstance(value, int) or value < 1:
        told = "lacks" if value is None else f"has {value!r}, expected one positive integer, for"
        raise ConfigError(f"{gguf.file} {told} {_prefix(gguf)}{name}")
    return value


def _check_head(gguf: Gguf, own: Mapping[str, Any], head_dim: Any) -> None:
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name, head_dim) != head_dim:
            raise ConfigError(
                f"{gguf.file} has {_prefix(gguf)}{name} {own[name]!r}: jdllm follows the size of a head only,"
                f" {head_dim}"
            )


def _dtype(gguf: Gguf) -> str:
    """The type in which weights are loaded by default."""
    sizes: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + math.prod(tensor.shape)
    most = max(sizes, key=lambda name: sizes[name], default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _token_ids(values: Mapping[str, Any], *, separate_turn: bool) -> dict[str, Any]:
    """Ids of tokens, `None` where there are none.

    The end of a turn ends a text. LLaDA's configuration has a key of its own for it (`separate_turn`).
    """
    names = ("bos", "eos", "eot", "eom", "mask")
    ids = {name: values.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    found = {"bos_token_id": ids["bos"], "mask_token_id": ids["mask"]}
    ends = [ids["eos"]] if separate_turn else [ids["eos"], ids["eot"], ids["eom"]]
    found["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None)) or None
    if separate_turn:
        found["eot_token_id"] = ids["eot"]
    return found


def _rope_scaling(gguf: Gguf, own: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """`rope_scaling`, where there is any."""
    kind, factor, original = (own.get(name) for name in _SCALING)
    kind = kind or ("none" if factor in (None, 0.0, 1.0) else "linear")
    factors = gguf.tensors.get(ROPE_FACTORS)
    if kind not in _SCALINGS or (factors is not None and kind in _SCALINGS[1:]):
        raise ConfigError(
            f"{gguf.file} has {_prefix(gguf)}rope.scaling.type {kind!r}, which jdllm does not follow there:"
            f" {', '.join(_SCALINGS)} without {ROPE_FACTORS}"
        )
    if factors is not None:
        scaling = _by_factors(gguf, factors, float(own.get("rope.freq_base", 10000.0)), head_dim)
    elif kind == "none":
        return {}
    else:
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        if kind == "yarn":
            betas = {name: own.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
            scaling |= {name: value for name, value in betas.items() if value is not None}
    return {"rope_scaling": scaling} if scaling else {}


def _by_factors(gguf: Gguf, tensor: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling of Llama 3 whose divisors of the frequencies these are."""
    factors = np.fromfile(tensor.file, np.float32, math.prod(tensor.shape), offset=tensor.offset)
    if tensor.kind.name == "F32" and factors.shape == (head_dim // 2,) and (factors >= 1).all():
        if (factors == 1).all():
            return {}
        plain = inverse_frequencies(RopeConfig(theta), head_dim)
        factor = float(factors.max())
        for original in (_USUAL_CONTEXT, *(1 << power for power in range(4, 24))):
            rope = RopeConfig(theta, kind="llama3", factor=factor, original_positions=original)
            if np.allclose(plain / inverse_frequencies(rope, head_dim), factors, _TOLERANCE, 0):
                return {**_LLAMA3, "factor": factor, "original_max_position_embeddings": original}
    raise ConfigError(
        f"{gguf.file} has {ROPE_FACTORS}, whose values are not those of Llama 3's rotary scaling"
        " (low_freq_factor 1, high_freq_factor 4): jdllm does not follow others"
    )


def _expert_values(gguf: Gguf, values: Mapping[str, Any]) -> dict[str, Any]:
    """What LLaDA-MoE states beside. All layers have experts: a dense one would have other tensors."""
    return {
        "dense_intermediate_size": values.get("dense_intermediate_size", values["expert_intermediate_size"]),
        "moe_layer_freq": [1] * min(values["num_hidden_layers"], MOST_LAYERS),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in gguf.tensors,
    }
