"""The families that jdllm runs: one row each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig
from jdllm.models.families import decoder, dream, llada, llada_moe, llama, mistral, qwen2, qwen3


class Family(NamedTuple):
    """What a family adds to the one transformer.

    - `config_from_hf`: translates a parsed `config.json`.
    - `tensor_names`: leaf path in the spec tree -> Hugging Face tensor name, `{layer}` where it has layers
      and `{expert}` where it has experts.
    - `mask_token`, `turn_end`: text of the mask and end-of-turn tokens, whose ids `config.json` may lack.
    """

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    tensor_names: Mapping[str, str]
    mask_token: str | None = None
    turn_end: str | None = None


FAMILIES: dict[str, Family] = {
    "llada": Family(llada.config_from_hf, llada.TENSOR_NAMES, llada.MASK_TOKEN, llada.TURN_END),
    "llada_moe": Family(
        llada_moe.config_from_hf, llada_moe.TENSOR_NAMES, llada_moe.MASK_TOKEN, llada_moe.TURN_END
    ),
    "dream": Family(dream.config_from_hf, decoder.TENSOR_NAMES, dream.MASK_TOKEN, dream.TURN_END),
    "llama": Family(llama.config_from_hf, decoder.TENSOR_NAMES, turn_end=llama.TURN_END),
    "mistral": Family(mistral.config_from_hf, decoder.TENSOR_NAMES),
    "qwen2": Family(qwen2.config_from_hf, decoder.TENSOR_NAMES, turn_end=qwen2.TURN_END),
    "qwen3": Family(qwen3.config_from_hf, decoder.TENSOR_NAMES, turn_end=qwen3.TURN_END),
}

_ARCHITECTURES: dict[str, str] = {
    "LLaDAModelLM": "llada",
    "LLaDAMoEModel": "llada_moe",
    "LLaDAMoEModelLM": "llada_moe",
    "DreamModel": "dream",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_MODEL_TYPES: dict[str, str] = {
    "llada": "llada",
    "lladamoe": "llada_moe",
    "Dream": "dream",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a parsed `config.json` names by `architectures` or, failing that, by `model_type`.

    Raises `ConfigError`, listing the known ones, when it names none.
    """
    architectures, model_type = hf_config.get("architectures"), hf_config.get("model_type")
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and name in _ARCHITECTURES:
            return FAMILIES[_ARCHITECTURES[name]]
    if isinstance(model_type, str) and model_type in _MODEL_TYPES:
        return FAMILIES[_MODEL_TYPES[model_type]]
    raise ConfigError(
        f"unknown model family (architectures {architectures}, model_type {model_type!r}):"
        f" jdllm runs {', '.join(sorted(_ARCHITECTURES))}"
    )
