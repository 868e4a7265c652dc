# pyright: reportMissingImports=false
"""Writes checkpoints of bitsandbytes with the library itself.

`python3 tests/goldens/quantised/write_bitsandbytes.py` in an environment with torch 2.13.0, bitsandbytes
0.50.2 and safetensors 0.8.0. int8 weights become float32.
"""

import functools
from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Int8Params, Linear8bitLt
from checkpoint import Packed, add_checksums, write

SCHEMES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
    "nf4_double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    "int8_rows": {"load_in_8bit": True},
}


def packed(weight: torch.Tensor, settings: dict[str, Any]) -> Packed:
    """A matrix, rounded to bfloat16 before."""
    weight = weight.to(torch.bfloat16)
    if settings.get("load_in_8bit"):
        linear = Linear8bitLt(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False)
        linear.weight = Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
        linear(torch.zeros(1, weight.shape[1], dtype=torch.float16))
        state = linear.state_dict()
        return state, functional.int8_vectorwise_dequant(state["weight"], state["SCB"])
    kind, double = settings["bnb_4bit_quant_type"], settings["bnb_4bit_use_double_quant"]
    codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=double)
    parts = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    # On a CPU this version scales wrongly where a block spans two rows: so each row is a block.
    state.shape = torch.Size((weight.numel() // state.blocksize, state.blocksize))
    return {"weight": codes, **parts}, functional.dequantize_4bit(codes, state).reshape(weight.shape)


if __name__ == "__main__":
    checksums = {}
    for name, settings in SCHEMES.items():
        told = {"quant_method": "bitsandbytes", **settings}
        pack = functools.partial(packed, settings=settings)
        checksums[name] = write(name, torch.bfloat16, pack, told)
    add_checksums(checksums)
