"""The families that jdllm runs: one row each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jdllm.errors import ConfigError
from jdllm.models import llada
from jdllm.models.config import ModelConfig


class Family(NamedTuple):
    """What a family adds to the one transformer.

    - `config_from_hf`: translates a parsed `config.json`.
    - `tensor_names`: leaf path in the spec tree -> Hugging Face tensor name, `{layer}` where it has layers.
    """

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    tensor_names: Mapping[str, str]


FAMILIES: dict[str, Family] = {
    "llada": Family(llada.config_from_hf, llada.TENSOR_NAMES),
}

_ARCHITECTURES: dict[str, str] = {
    "LLaDAModelLM": "llada",
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a parsed `config.json` names by `architectures` or `model_type`.

    Raises `ConfigError`, listing the known ones, when it names none.
    """
    architectures, model_type = hf_config.get("architectures"), hf_config.get("model_type")
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and name in _ARCHITECTURES:
            return FAMILIES[_ARCHITECTURES[name]]
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise ConfigError(
        f"unknown model family (architectures {architectures}, model_type {model_type!r}):"
        f" jdllm runs {', '.join(sorted(_ARCHITECTURES))}"
    )
