# pyright: reportMissingImports=false
"""Writes GGUF files, and what transformers loads and generates from them.

`PYTHONPATH=. python3 tests/goldens/quantised/write_gguf.py` in an environment with torch 2.13.0, transformers
5.24.0, gguf 0.19.0 and safetensors 0.8.0.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.checkpoints.gguf_writer import write_gguf

HERE = Path(__file__).parent
IDS, NEW = 128, 12
PROMPTS = [[5, 6, 7, 9], [100, 3, 3, 42, 17, 8], [64]]
KINDS = {
    "llama": {"attn_q.weight": Kind.Q5_0, "attn_k.weight": Kind.F16, "attn_v.weight": Kind.Q8_0},
    "qwen2": {},
    "qwen3": {},
}
QWEN3 = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}


def write_qwen3(directory: Path) -> Path:
    """Write a random model; its norms are no ones."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**QWEN3))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}))
    return directory


def write(family: str, directory: Path) -> dict[str, Any]:
    """Write a model of tests/goldens with the first ids and a tied head; returns what transformers says."""
    source = directory / family
    source.mkdir()
    original = write_qwen3(directory / "original") if family == "qwen3" else HERE.parent / family
    config = json.loads((original / "config.json").read_text())
    config |= {"vocab_size": IDS, "tie_word_embeddings": True, "eos_token_id": 2, "pad_token_id": 2}
    (source / "config.json").write_text(json.dumps(config))
    weights = load_file(original / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:IDS].clone()
    save_file(weights, source / "model.safetensors")
    target = HERE / f"{family}.gguf"
    kinds = {**KINDS[family], "token_embd.weight": Kind.F16, "weight": Kind.Q4_0}
    write_gguf(source, target, kinds, values={"general.name": family})
    return read(target)


def read(file: Path) -> dict[str, Any]:
    """Checksums of weights in float32, and greedy tokens behind prompts."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    sums = {
        name: hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()
        for name, x in model.state_dict().items()
        if x.ndim == 2 and name != "lm_head.weight"
    }
    tokens = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=[]
        )
        tokens.append(found[0, len(prompt) :].tolist())
    return {"sha256": sums, "prompts": PROMPTS, "tokens": tokens}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        found = {family: write(family, Path(directory)) for family in KINDS}
    (HERE / "gguf.json").write_text(json.dumps(found) + "\n")
