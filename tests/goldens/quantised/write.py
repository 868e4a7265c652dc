# pyright: reportMissingImports=false
"""Writes the checkpoints of this directory with the library that users write such checkpoints with.

`python3 tests/goldens/quantised/write.py` in an environment with torch 2.13.0, compressed-tensors 0.20.1 and
safetensors 0.8.0. Each checkpoint is tests/goldens/llama in one scheme, with the first ids and a tied head.
`sha256.json` has the checksums of the values that the library makes of its own weights, by checkpoint and
tensor.
"""

from collections.abc import Callable

import torch
from checkpoint import Packed, add_checksums, write
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

SCHEMES = {
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 24]},
    ),
    "int8_channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8_asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4_asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int3": ("pack-quantized", {"num_bits": 3, "strategy": "channel"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
}


def least_and_most(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the values that share a scale."""
    match args.strategy:
        case "tensor":
            parts = weight.reshape(1, -1)
        case "channel":
            parts = weight
        case "block":
            height, width = args.block_structure
            rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
            padded = torch.zeros(rows * height, columns * width, dtype=weight.dtype)
            padded[: weight.shape[0], : weight.shape[1]] = weight
            parts = padded.reshape(rows, height, columns, width).transpose(1, 2).reshape(rows, columns, -1)
        case _:
            parts = weight.unflatten(-1, (-1, args.group_size))
    keep = args.strategy in ("tensor", "channel")
    return parts.amin(-1, keepdim=keep), parts.amax(-1, keepdim=keep)


def packer(form: str, scheme: QuantizationScheme, dtype: torch.dtype) -> Callable[[torch.Tensor], Packed]:
    """What packs a matrix in a scheme."""
    compressor = BaseCompressor.load_from_registry(form)

    def pack(weight: torch.Tensor) -> Packed:
        value, extra = weight.to(dtype), {}
        least, most = least_and_most(value, scheme.weights)
        if form.startswith("nvfp4"):
            extra["weight_global_scale"] = generate_gparam(value.min(), value.max()).reshape(1)
        of_all = extra.get("weight_global_scale")
        scale, zero = calculate_qparams(least, most, scheme.weights, global_scale=of_all)
        extra["weight_scale"] = scale if form.startswith("nvfp4") else scale.to(dtype)
        extra["weight_zero_point"] = zero.to(torch.int8)
        packed = compressor.compress({"weight": value, **extra}, scheme)
        return packed, compressor.decompress(packed, scheme)["weight"]

    return pack


if __name__ == "__main__":
    checksums = {}
    for index, (name, (form, args)) in enumerate(SCHEMES.items()):
        dtype = torch.bfloat16 if form.startswith("nvfp4") else [torch.bfloat16, torch.float16][index % 2]
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=form)
        settings = QuantizationConfig(
            config_groups={"group_0": scheme},
            format=form,
            quantization_status="compressed",
            ignore=["lm_head"],
        )
        checksums[name] = write(name, dtype, packer(form, scheme, dtype), settings.model_dump())
    add_checksums(checksums)
