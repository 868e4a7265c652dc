"""What the families in the layout of Llama share: keys of `config.json` and tensor names."""

from collections.abc import Mapping
from typing import Any

from jdllm.errors import ConfigError
from jdllm.models.config import MOST_EXPERTS, MOST_LAYERS, HfFields, ModelConfig, MoeConfig
from jdllm.models.rotary import RopeConfig

_LAYER = "model.layers.{layer}."
_MLP = _LAYER + "mlp."

TENSOR_NAMES: dict[str, str] = {
    "embed": "model.embed_tokens.weight",
    "layers/attn_norm": _LAYER + "input_layernorm.weight",
    "layers/q": _LAYER + "self_attn.q_proj.weight",
    "layers/k": _LAYER + "self_attn.k_proj.weight",
    "layers/v": _LAYER + "self_attn.v_proj.weight",
    "layers/q_bias": _LAYER + "self_attn.q_proj.bias",
    "layers/k_bias": _LAYER + "self_attn.k_proj.bias",
    "layers/v_bias": _LAYER + "self_attn.v_proj.bias",
    "layers/q_norm": _LAYER + "self_attn.q_norm.weight",
    "layers/k_norm": _LAYER + "self_attn.k_norm.weight",
    "layers/o": _LAYER + "self_attn.o_proj.weight",
    "layers/ffn_norm": _LAYER + "post_attention_layernorm.weight",
    "layers/gate": _LAYER + "mlp.gate_proj.weight",
    "layers/up": _LAYER + "mlp.up_proj.weight",
    "layers/down": _LAYER + "mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}

EXPERT_NAMES: dict[str, str] = TENSOR_NAMES | {
    "layers/router": _MLP + "gate.weight",
    "layers/expert_bias": _MLP + "expert_bias",
    "layers/experts_gate": _MLP + "experts.{expert}.gate_proj.weight",
    "layers/experts_up": _MLP + "experts.{expert}.up_proj.weight",
    "layers/experts_down": _MLP + "experts.{expert}.down_proj.weight",
}
"""`TENSOR_NAMES` of models that have experts."""


def decoder_config(
    values: Mapping[str, Any],
    fields: HfFields,
    *,
    default_theta: float,
    ffn_key: str = "intermediate_size",
    layer_type: str = "full_attention",
    partial_rotary: bool = False,
    **differences: Any,
) -> ModelConfig:
    """Translate the keys that all these families have.

    Arguments:
    - `values`, `fields`: the parsed `config.json`, and typed access to it.
    - `default_theta`: base of the rotary embedding where the configuration has none.
    - `ffn_key`: holds the width of the feed-forward layer.
    - `layer_type`: the only kind of layer that `layer_types` may list.
    - `partial_rotary`: `partial_rotary_factor` has the effect that it names.
    - `differences`: fields of `ModelConfig` that the family sets itself.

    Raises `ConfigError` for a key that is missing, impossible or asks for what the transformer lacks.
    """
    fields.check_quantized()
    fields.require("hidden_act", ("silu",))
    fields.require("mlp_bias", (False,))
    fields.require("pretraining_tp", (1,))
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    fields.require_each("layer_types", layer_type, layers)
    heads, kv_heads, head_dim = fields.head_layout(
        "num_attention_heads", "num_key_value_heads", "hidden_size"
    )
    return ModelConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size(ffn_key),
        max_positions=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        rope=RopeConfig.from_hf(values, default_theta=default_theta, partial=partial_rotary),
        tied_head=fields.get("tie_word_embeddings", bool, False),
        mask_id=fields.token_id("mask_token_id"),
        bos_id=fields.token_id("bos_token_id"),
        eos_id=fields.token_id("eos_token_id"),
        more_eos_ids=fields.token_ids("eos_token_id")[1:],
        dtype=fields.dtype(),
        **differences,
    )


def experts_config(fields: HfFields, dense_layers: tuple[int, ...], **rule: Any) -> MoeConfig | None:
    """The experts of a model, whose numbers are `num_experts` and `num_experts_per_tok`.

    Arguments:
    - `fields`: typed access to the parsed `config.json`.
    - `dense_layers`: layers without experts; where all layers are, there is no `MoeConfig`.
    - `rule`: the other fields of `MoeConfig`.

    Raises `ConfigError` for a number that is missing or impossible.
    """
    if len(dense_layers) == fields.size("num_hidden_layers", most=MOST_LAYERS):
        return None
    experts, top_k = fields.size("num_experts", most=MOST_EXPERTS), fields.size("num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {top_k} exceeds num_experts {experts}")
    return MoeConfig(experts, top_k, dense_layers=dense_layers, **rule)


def causal_config(
    values: Mapping[str, Any], fields: HfFields, *, window: int | None = None, **differences: Any
) -> ModelConfig:
    """`decoder_config` of the causal families, whose code is in transformers itself.

    Arguments:
    - `values`, `fields`: the parsed `config.json`, and typed access to it.
    - `window`: the sliding window of all layers, if they have one; `layer_types` must agree.
    - `differences`: fields of `ModelConfig` that the family sets itself, and options of `decoder_config`.

    Raises `ConfigError` as `decoder_config` does, and for code of the checkpoint's own.
    """
    fields.require("is_causal", (True,))
    fields.refuse(
        "auto_map", "the model has code of its own, which jdllm does not run; without it, remove the key"
    )
    return decoder_config(
        values,
        fields,
        layer_type="full_attention" if window is None else "sliding_attention",
        attention="causal",
        sliding_window=window,
        **differences,
    )


def window_of_qwen(fields: HfFields) -> int | None:
    """The sliding window of all layers of a Qwen model, or `None` where they have none.

    Layers have it by `layer_types` or, without that, from `max_window_layers` on. Raises `ConfigError` where
    `max_window_layers` gives it to some layers only, since all layers see keys by one range; such a list of
    `layer_types` is refused by `decoder_config`.

    Source: Qwen2Config and Qwen3Config of transformers.
    """
    used = fields.get("use_sliding_window", bool, False)
    window = fields.size_or_none("sliding_window") if used else None
    if window is None:
        return None
    if kinds := fields.get("layer_types", list, []):
        return window if kinds[0] == "sliding_attention" else None
    layers, first = fields.size("num_hidden_layers"), fields.get("max_window_layers", int)
    if 0 < first < layers:
        raise ConfigError(
            f"config.json: max_window_layers is {first}, so that {layers - first} of {layers} layers have the"
            f" sliding window; expected 0 (all have it) or at least {layers} (none has it)"
        )
    return window if first <= 0 else None
