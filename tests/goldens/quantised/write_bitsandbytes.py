# pyright: reportMissingImports=false
"""Writes checkpoints of bitsandbytes with the library itself.

`python3 tests/goldens/quantised/write_bitsandbytes.py` in an environment with torch 2.13.0, bitsandbytes
0.50.2 and safetensors 0.8.0, behind `write.py`, to whose `sha256.json` it adds. int8 weights become float32.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Int8Params, Linear8bitLt
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
SOURCE = HERE.parent / "llama"
IDS = 128
CHANGED = {"vocab_size": IDS, "tie_word_embeddings": True, "eos_token_id": 2, "pad_token_id": 2}
SCHEMES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
    "nf4_double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    "int8_rows": {"load_in_8bit": True},
}


def packed(weight: torch.Tensor, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the library stores of a matrix, by the ends of names, and the values that it makes of this."""
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


def write(name: str, settings: dict[str, Any]) -> dict[str, str]:
    stored, sums = {}, {}
    for key, value in load_file(SOURCE / "model.safetensors").items():
        value = value.to(torch.bfloat16)
        if key == "lm_head.weight":
            continue
        if not key.endswith("_proj.weight"):
            stored[key] = value[:IDS] if key == "model.embed_tokens.weight" else value
            continue
        parts, found = packed(value, settings)
        stored |= {f"{key.removesuffix('weight')}{part}": x.contiguous() for part, x in parts.items()}
        sums[key] = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((SOURCE / "config.json").read_text()) | CHANGED | {"torch_dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "bitsandbytes", **settings}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sums


if __name__ == "__main__":
    path = HERE / "sha256.json"
    checksums = json.loads(path.read_text())
    checksums |= {name: write(name, settings) for name, settings in SCHEMES.items()}
    path.write_text(json.dumps(checksums, indent=1) + "\n")
