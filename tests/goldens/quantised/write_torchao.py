# pyright: reportMissingImports=false
"""Writes checkpoints of torchao with the library itself, as transformers saves them.

`python3 tests/goldens/quantised/write_torchao.py` in an environment with torch 2.13.0, torchao 0.18.0 and
safetensors 0.8.0. The library packs integers of 4 bits (`Int4Tensor`) on a GPU alone: here they are packed as
its kernels read them, and their values are what its GPTQ takes them for, rounded.
"""

import json
from typing import Any

import torch
from checkpoint import HERE, SOURCE, Packed, add_checksums, write
from safetensors.torch import load_file, save_file
from torchao.prototype.gptq.api import _int4_row_dequantize_zp, _int4_row_quantize_zp_precomputed_qparams
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4Tensor,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    quantize_,
)

GROUP = 32
ASYMMETRIC = IntxWeightOnlyConfig(torch.int4, PerGroup(GROUP), MappingType.ASYMMETRIC)
SCHEMES: dict[str, tuple[torch.dtype, Any]] = {
    "ao_int8": (torch.bfloat16, Int8WeightOnlyConfig()),
    "ao_int8_groups": (torch.float16, Int8WeightOnlyConfig(granularity=PerGroup(GROUP))),
    "ao_fp8": (torch.bfloat16, Float8WeightOnlyConfig()),
    "ao_intx4": (torch.bfloat16, ASYMMETRIC),
    "ao_int4": (torch.bfloat16, None),
}


def packed_int4(weight: torch.Tensor) -> tuple[Int4Tensor, torch.Tensor]:
    """Two integers in each byte, and scales and zeros for groups of columns."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    least, most = groups.amin(-1), groups.amax(-1)
    scale = ((most - least) / 15).to(weight.dtype)
    zero = (least + 8 * scale.float()).to(weight.dtype)
    scale, zero = scale.T.contiguous(), zero.T.contiguous()
    wide = scale.float(), zero.float()
    q = _int4_row_quantize_zp_precomputed_qparams(weight.float(), *wide, GROUP)
    data = (q[:, ::2] & 15) | (q[:, 1::2] << 4)
    values = _int4_row_dequantize_zp(q, *wide, GROUP).to(weight.dtype)
    return Int4Tensor(data, scale, zero, [1, GROUP], weight.shape), values


def quantised(weight: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of the library, and its values."""
    if config is None:
        return packed_int4(weight)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(linear, config)
    return linear.weight, linear.weight.dequantize()


def add_metadata(name: str, told: list[str]) -> None:
    """Write what the files say of their matrices, which are in the order of the source."""
    path = HERE / name / "model.safetensors"
    keys = [key for key in load_file(SOURCE / "model.safetensors") if key.endswith("_proj.weight")]
    stored, matrices = load_file(path), dict(zip(keys, told, strict=True))
    plain = {key: json.dumps({"_type": "Tensor"}) for key in stored if key.endswith("weight")}
    names = json.dumps([*plain, *matrices])
    save_file(stored, path, metadata={"format": "pt", "tensor_names": names, **plain, **matrices})


if __name__ == "__main__":
    checksums = {}
    for name, (dtype, config) in SCHEMES.items():
        told: list[str] = []

        def pack(
            weight: torch.Tensor, told: list[str] = told, dtype: Any = dtype, config: Any = config
        ) -> Packed:
            matrix, values = quantised(weight.to(dtype), config)
            parts, metadata = flatten_tensor_state_dict({"of.weight": matrix})
            told.append(metadata["of.weight"])
            return {key.removeprefix("of."): part for key, part in parts.items()}, values

        kind = "Int4WeightOnlyConfig" if config is None else type(config).__name__
        settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2}}}
        checksums[name] = write(name, dtype, pack, settings)
        add_metadata(name, told)
    add_checksums(checksums)
