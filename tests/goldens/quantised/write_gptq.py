# pyright: reportMissingImports=false
"""Writes checkpoints of GPTQ and AWQ with the library that users write them with.

`python3 tests/goldens/quantised/write_gptq.py` in an environment with torch 2.13.0, gptqmodel 7.7.0 and
safetensors 0.8.0. Integers are rounded to nearest. An
order of columns is drawn, as if it were that of their activations.
"""

import functools
from typing import Any

import torch
from checkpoint import Packed, add_checksums, write
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

GPTQ: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    "gptq_ordered": {"bits": 4, "group_size": 32, "sym": True, "desc_act": True},
    "gptq_8": {"bits": 8, "group_size": 32, "sym": False, "desc_act": False},
    "gptq_v2": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "awq": {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}


def scales_and_zeros(weight: torch.Tensor, group: torch.Tensor, most: int, sym: bool) -> tuple[Any, Any]:
    """For each row and group of columns."""
    scales, zeros = [], []
    for index in range(int(group.max()) + 1):
        own = weight[:, group == index]
        if sym:
            scale = (own.abs().amax(1) * 2 / most).clamp(min=1e-8)
            zero = torch.full_like(scale, (most + 1) // 2)
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scale = ((high - low) / most).clamp(min=1e-8)
            zero = torch.round(-low / scale)
        scales.append(scale.half().float())
        zeros.append(zero)
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def packed(name: str, weight: torch.Tensor, settings: dict[str, Any]) -> Packed:
    """What the library stores of a matrix, and the values that it makes of this."""
    rows, columns = weight.shape
    bits, size = settings["bits"], settings["group_size"]
    group = torch.arange(columns) // size
    if settings.get("desc_act"):
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    scales, zeros = scales_and_zeros(weight, group, (1 << bits) - 1, settings.get("sym", False))
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = weight
    kind = AwqTorchLinear if name == "awq" else TorchLinear
    own = {"sym": settings.get("sym", False), "desc_act": settings.get("desc_act", False)}
    module = kind(
        bits=bits, group_size=size, in_features=columns, out_features=rows, register_buffers=True, **own
    )
    module.pack(linear, scales, zeros, group.int())
    module.post_init()
    if name == "awq":
        found = dequantize_gemm(module.qweight, module.qzeros, module.scales, bits, size).T.contiguous()
    else:
        found = module.dequantize_weight().T.contiguous()
    if settings.get("checkpoint_format", "gptq") == "gptq" and name != "awq":
        config = QuantizeConfig(bits=bits, group_size=size, **own)
        convert_gptq_v2_to_v1_format_module(module, config)
    names = ("qweight", "qzeros", "scales", "g_idx")
    return {part: x for part, x in module.state_dict().items() if part in names}, found


if __name__ == "__main__":
    checksums = {}
    for name, settings in GPTQ.items():
        told = {"quant_method": "awq" if name == "awq" else "gptq", **settings}
        pack = functools.partial(packed, name, settings=settings)
        checksums[name] = write(name, torch.float16, pack, told)
    add_checksums(checksums)
