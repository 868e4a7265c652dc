"""Running `jdllm plan` for models of published shapes."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from jdllm.cli import app

GIB = 2**30

# Sizes of the published models, in the words of each family's config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "llada": {
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "mlp_hidden_size": 12288,
        "vocab_size": 126464,
        "embedding_size": 126464,
        "torch_dtype": "bfloat16",
    },
    "dream": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "torch_dtype": "bfloat16",
        "vocab_size": 152064,
    },
    "llada_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "dense_intermediate_size": 8192,
        "expert_intermediate_size": 1024,
        "moe_layer_freq": [1] * 16,
        "num_experts": 64,
        "torch_dtype": "bfloat16",
        "num_experts_per_tok": 8,
        "vocab_size": 157184,
        "mask_token_id": None,
    },
}


def invoke(model: Path | str, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(model), *options])


def run(model: Path | str, *options: str, context: int = 32768, memory: str = "24GiB") -> Result:
    shape = ("--context", str(context), "--memory", memory)
    if "--target" not in options:
        options += ("--target", "h200")
    return invoke(model, *shape, *options)


def facts(model: Path | str, *options: str, code: int = 0, **shape: Any) -> dict[str, Any]:
    result = run(model, *options, "--json", **shape)
    assert result.exit_code == code
    assert (result.stderr == "") == (code == 0)
    return json.loads(result.stdout)


def assert_mistake(result: Result, *words: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
