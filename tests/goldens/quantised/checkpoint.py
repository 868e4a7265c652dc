# pyright: reportMissingImports=false
"""What the writers of this directory share: the model that they quantise, and how a checkpoint is written."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
SOURCE = HERE.parent / "llama"
IDS = 128
CHANGED = {"vocab_size": IDS, "tie_word_embeddings": True, "eos_token_id": 2, "pad_token_id": 2}

Packed = tuple[Mapping[str, torch.Tensor], torch.Tensor]
"""What a library stores of a matrix, by the ends of names, and the values that the library makes of this."""


def write(
    name: str, dtype: torch.dtype, pack: Callable[[torch.Tensor], Packed], settings: Mapping[str, Any]
) -> dict[str, str]:
    """Write a checkpoint of tests/goldens/llama with the first ids and a tied head.

    Arguments:
    - `name`: of its directory.
    - `dtype`: of what is not quantised.
    - `pack`: called with each matrix of a layer, in float32.
    - `settings`: what `config.json` says of the quantised weights.

    Returns checksums of the values of each quantised matrix.
    """
    stored, sums = {}, {}
    for key, value in load_file(SOURCE / "model.safetensors").items():
        if key == "lm_head.weight":
            continue
        if not key.endswith("_proj.weight"):
            stored[key] = (value[:IDS] if key == "model.embed_tokens.weight" else value).to(dtype)
            continue
        parts, found = pack(value)
        stored |= {f"{key.removesuffix('weight')}{part}": x.contiguous() for part, x in parts.items()}
        sums[key] = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((SOURCE / "config.json").read_text()) | CHANGED
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), "quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sums


def add_checksums(sums: Mapping[str, dict[str, str]]) -> None:
    """Write checksums of checkpoints, by their names, into `sha256.json` beside those of others."""
    path = HERE / "sha256.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | dict(sums), indent=1) + "\n")
