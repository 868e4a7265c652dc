# pyright: reportMissingImports=false
"""Writes adapters with PEFT itself, and what PEFT makes of them.

`python3 tests/goldens/lora/write.py` in an environment with torch 2.13.0, transformers 5.24.0, PEFT 0.21.2
and safetensors 0.8.0. Each directory has an adapter of a checkpoint of tests/goldens, with random weights,
and `goldens.safetensors`: a prompt, logits and greedy tokens of the model that `merge_and_unload` returns,
and some of the weights of this model.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
LAYER = "model.layers.1."
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "linear": (
        "llama",
        torch.float32,
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 3},
            "alpha_pattern": {r"layers\.0\..*up_proj": 3},
        },
    ),
    "stabilised": (
        "qwen2",
        torch.float32,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"],
            "exclude_modules": ["self_attn.o_proj"],
            "layers_to_transform": [1],
            "use_rslora": True,
        },
    ),
    "pattern": (
        "llama",
        torch.bfloat16,
        {"target_modules": r".*layers\.\d\.(self_attn\.[kv]|mlp\.gate)_proj"},
    ),
    "embeddings": (
        "llama",
        torch.float32,
        {"target_modules": ["embed_tokens", "lm_head"], "modules_to_save": ["norm"]},
    ),
}
KEPT = {
    "linear": ("self_attn.q_proj", "mlp.down_proj"),
    "stabilised": ("self_attn.q_proj", "self_attn.v_proj"),
    "pattern": ("self_attn.k_proj", "mlp.gate_proj"),
    "embeddings": ("input_layernorm",),
}


def write(name: str) -> None:
    base, dtype, settings = CASES[name]
    directory = HERE / name
    model = AutoModelForCausalLM.from_pretrained(HERE.parent / base, dtype=dtype)
    config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **settings)
    trained = get_peft_model(model, config)
    for key, parameter in trained.named_parameters():
        if "modules_to_save" in key:
            parameter.data += 0.1 * torch.randn_like(parameter)
    trained.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink()
    values = json.loads((directory / "adapter_config.json").read_text())
    if isinstance(values["target_modules"], list):
        values["target_modules"].sort()
    values["base_model_name_or_path"] = base
    (directory / "adapter_config.json").write_text(json.dumps(values, indent=1) + "\n")
    model = AutoModelForCausalLM.from_pretrained(HERE.parent / base, dtype=dtype)
    merged = PeftModel.from_pretrained(model, directory).merge_and_unload().eval()
    weights = merged.state_dict()
    kept = {f"{LAYER}{module}.weight": weights[f"{LAYER}{module}.weight"] for module in KEPT[name]}
    prompt = torch.randint(0, 400, (1, 12))
    told = {"prompt": prompt[0], **kept}
    with torch.no_grad():
        if dtype == torch.float32:
            told["logits"] = merged(prompt).logits[0]
            told["output"] = merged.generate(
                prompt, do_sample=False, max_new_tokens=16, eos_token_id=None, attention_mask=prompt >= 0
            )[0]
    save_file({key: value.contiguous() for key, value in told.items()}, directory / "goldens.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, case in enumerate(CASES):
        torch.manual_seed(number)
        write(case)
