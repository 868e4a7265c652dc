"""The families that jdllm runs: one row each."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig
from jdllm.models.families import (
    decoder,
    dream,
    fast_dllm_v2,
    llada,
    llada2,
    llada_moe,
    llama,
    mistral,
    nemotron_labs_diffusion,
    qwen2,
    qwen3,
    sdar,
    sdar_moe,
)


class Family(NamedTuple):
    """What a family adds to the one transformer.

    - `name`: the `family` of its `ModelConfig`s.
    - `architectures`, `model_types`: what `config.json` may call it.
    - `config_from_hf`: translates a parsed `config.json`.
    - `tensor_names`: leaf path in the spec tree -> Hugging Face tensor name, `{layer}` where it has layers
      and `{expert}` where it has experts. Leaves with one name are its rows, one leaf after another.
    - `mask_token`, `turn_end`: text of the mask and end-of-turn tokens, whose ids `config.json` may lack.
    - `ignored`: ends of the names of tensors that checkpoints may have and the model does not read.
    - `draft_adapter`: the directory in a checkpoint that has the adapter with which the model drafts.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    tensor_names: Mapping[str, str]
    mask_token: str | None = None
    turn_end: str | None = None
    ignored: tuple[str, ...] = ()
    draft_adapter: str | None = None


FAMILIES: dict[str, Family] = {}
"""The families by name."""


def register(family: Family) -> None:
    """Let checkpoints be of a family; raises `ConfigError` for a name of it that is taken."""
    for kind, of in _KINDS.items():
        known = {name for other in FAMILIES.values() for name in of(other)}
        if taken := known.intersection(of(family)):
            raise ConfigError(f"{kind} {min(taken)!r} is registered already: name the family otherwise")
    FAMILIES[family.name] = family


def unregister(family: Family) -> None:
    """Take back a registration; no model of the family may be in use."""
    del FAMILIES[family.name]


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a parsed `config.json` names by `architectures` or, failing that, by `model_type`.

    Raises `ConfigError`, listing the known ones, when it names none.
    """
    architectures, model_type = hf_config.get("architectures"), hf_config.get("model_type")
    by_architecture = {name: family for family in FAMILIES.values() for name in family.architectures}
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and name in by_architecture:
            return by_architecture[name]
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    raise ConfigError(
        f"unknown model family (architectures {architectures}, model_type {model_type!r}):"
        f" jdllm runs {', '.join(sorted(by_architecture))}"
    )


_KINDS: dict[str, Callable[[Family], tuple[str, ...]]] = {
    "family": lambda family: (family.name,),
    "architecture": lambda family: family.architectures,
    "model_type": lambda family: family.model_types,
}

for _family in (
    Family(
        "llada",
        ("LLaDAModelLM",),
        ("llada",),
        llada.config_from_hf,
        llada.TENSOR_NAMES,
        llada.MASK_TOKEN,
        llada.TURN_END,
    ),
    Family(
        "llada_moe",
        ("LLaDAMoEModel", "LLaDAMoEModelLM"),
        ("lladamoe",),
        llada_moe.config_from_hf,
        decoder.EXPERT_NAMES,
        llada_moe.MASK_TOKEN,
        llada_moe.TURN_END,
    ),
    Family(
        "llada2",
        ("LLaDA2MoeModelLM",),
        ("llada2_moe",),
        llada2.config_from_hf,
        llada2.TENSOR_NAMES,
        llada2.MASK_TOKEN,
        llada2.TURN_END,
    ),
    Family(
        "dream",
        ("DreamModel",),
        ("Dream",),
        dream.config_from_hf,
        decoder.TENSOR_NAMES,
        dream.MASK_TOKEN,
        dream.TURN_END,
    ),
    Family(
        "llama",
        ("LlamaForCausalLM",),
        ("llama",),
        llama.config_from_hf,
        decoder.TENSOR_NAMES,
        turn_end=llama.TURN_END,
    ),
    Family("mistral", ("MistralForCausalLM",), ("mistral",), mistral.config_from_hf, decoder.TENSOR_NAMES),
    Family(
        "qwen2",
        ("Qwen2ForCausalLM",),
        ("qwen2",),
        qwen2.config_from_hf,
        decoder.TENSOR_NAMES,
        turn_end=qwen2.TURN_END,
    ),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        ("qwen3",),
        qwen3.config_from_hf,
        decoder.TENSOR_NAMES,
        turn_end=qwen3.TURN_END,
    ),
    Family(
        "fast_dllm_v2",
        ("Fast_dLLM_QwenForCausalLM",),
        ("Fast_dLLM_Qwen",),
        fast_dllm_v2.config_from_hf,
        decoder.TENSOR_NAMES,
        fast_dllm_v2.MASK_TOKEN,
        fast_dllm_v2.TURN_END,
    ),
    Family(
        "nemotron_labs_diffusion",
        ("NemotronLabsDiffusionModel",),
        ("nemotron_labs_diffusion",),
        nemotron_labs_diffusion.config_from_hf,
        nemotron_labs_diffusion.TENSOR_NAMES,
        ignored=nemotron_labs_diffusion.IGNORED,
        draft_adapter=nemotron_labs_diffusion.DRAFT_ADAPTER,
    ),
    Family(
        "sdar",
        ("SDARForCausalLM",),
        ("sdar",),
        sdar.config_from_hf,
        decoder.TENSOR_NAMES,
        sdar.MASK_TOKEN,
        sdar.TURN_END,
    ),
    Family(
        "sdar_moe",
        ("SDARMoeForCausalLM",),
        ("sdar_moe",),
        sdar_moe.config_from_hf,
        decoder.EXPERT_NAMES,
        sdar.MASK_TOKEN,
        sdar.TURN_END,
    ),
):
    register(_family)
