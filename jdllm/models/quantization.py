"""Which quantised weights jdllm reads, by the words of `config.json`."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jdllm.errors import ConfigError
from jdllm.quantised import WeightForm

KEYS = ("quantization_config", "compression_config")

_NAMED = ("quant_method", "format", "bits", "load_in_4bit", "load_in_8bit")
_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "nvfp4-pack-quantized")
_UNREAD = ("sparsity_config", "transform_config", "kv_cache_scheme")


Method = Literal["compressed-tensors", "fp8", "gptq", "awq", "bitsandbytes", "torchao", "jdllm"]


class Quantization(NamedTuple):
    """How a checkpoint stores quantised weights.

    - `method`: which library's files these are; "jdllm" for a native checkpoint.
    - `scale`: what the scales of a module are called ("compressed-tensors", "fp8").
    - `block`: rows and columns that share a scale, `None` where no blocks do.
    - `bits`: of a weight ("gptq", "awq").
    - `shift`: by how much stored zeros are less than the zeros ("gptq").
    - `rounds_rows`: whether activations are rounded to floats of 8 bits, each row with a scale of its own
      ("compressed-tensors").
    - `form`: of the matrices of layers in a native checkpoint ("jdllm").
    """

    method: Method
    scale: str = ""
    block: tuple[int, int] | None = None
    bits: int = 4
    shift: int = 0
    rounds_rows: bool = False
    form: WeightForm | None = None


def quantization_of(values: Mapping[str, Any], file: str) -> Quantization | None:
    """What a configuration says of quantised weights; `None` where it says nothing of them.

    Arguments:
    - `values`: of the configuration.
    - `file`: its name, for messages.

    Raises `ConfigError` with the name of the method where jdllm does not read it.
    """
    for key in KEYS:
        settings = values.get(key)
        if not settings:
            continue
        if isinstance(settings, Mapping):
            found = _read(settings)
            if isinstance(found, Quantization):
                return found
            named = ", ".join(f"{name} {settings[name]}" for name in _NAMED if name in settings)
            told, reason = f"{key}{named and f' ({named})'}", found
        else:
            told, reason = key, "expected an object"
        raise ConfigError(
            f"{file} has {told}: {reason}; a checkpoint in bfloat16, float16 or float32 can, such as that"
            " which these were made from"
        )
    return None


def stored_form(values: Mapping[str, Any]) -> WeightForm | None:
    """The form in which a native checkpoint of this configuration stores the matrices of layers.

    Returns `None` where they are stored as all other weights. Raises what `quantization_of` raises.
    """
    found = quantization_of(values, "config.json")
    return None if found is None else found.form


def _read(settings: Mapping[str, Any]) -> Quantization | str:
    """What the settings say, or why jdllm does not follow them."""
    match settings:
        case {"quant_method": "fp8"} if (block := _pair(settings.get("weight_block_size"))) is not None:
            return Quantization("fp8", "weight_scale_inv", block)
        case {"quant_method": "compressed-tensors"}:
            return _compressed(settings)
        case {"quant_method": "bitsandbytes" | "torchao" as method}:
            return Quantization(method)
        case {"quant_method": "jdllm", "format": "int8" | "int4" | "uint4" | "fp8" as form}:
            return Quantization("jdllm", form=form)
        case {"quant_method": "gptq", "bits": 2 | 4 | 8 as bits}:
            form = str(settings.get("checkpoint_format", "gptq"))
            if form not in _SHIFTS:
                return f"jdllm does not read the checkpoint_format {form}"
            return Quantization("gptq", bits=bits, shift=_SHIFTS[form])
        case {"quant_method": "awq", "bits": 4} if str(settings.get("version", "gemm")).lower() == "gemm":
            return Quantization("awq")
        case _:
            return _NOT_READ


_SHIFTS = {"gptq": 1, "gptq_v2": 0}
_NOT_READ = "quantized weights of this kind cannot be loaded"


def _compressed(settings: Mapping[str, Any]) -> Quantization | str:
    """Of the library compressed-tensors. Activations stay in 16 bits, unless rows are rounded to floats."""
    if unread := [name for name in _UNREAD if settings.get(name)]:
        return f"jdllm does not follow its {unread[0]}"
    if settings.get("quantization_status", "compressed") != "compressed":
        return f"quantization_status is {settings['quantization_status']!r}, expected 'compressed'"
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        return "it lacks config_groups"
    formats = {group.get("format") or settings.get("format") for group in groups.values()}
    if unknown := formats - {*_FORMATS}:
        return f"jdllm does not read the format {min(map(str, unknown))}"
    weights = [group.get("weights") or {} for group in groups.values()]
    blocks = {_pair(one.get("block_structure")) for one in weights if one.get("strategy") == "block"}
    if len(blocks) > 1:
        return "its groups have blocks of several sizes"
    rounds_rows = all(_rounds_rows(group.get("input_activations")) for group in groups.values())
    return Quantization(
        "compressed-tensors", "weight_scale", next(iter(blocks), None), rounds_rows=rounds_rows
    )


def _rounds_rows(activations: Any) -> bool:
    match activations:
        case {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}:
            return True
        case _:
            return False


def _pair(value: Any) -> tuple[int, int] | None:
    match value:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
        case _:
            return None
