"""Logits of random checkpoints against transformers itself, which a machine with a card has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM

torch = pytest.importorskip("torch", reason="transformers needs torch for its models")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e3}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"head_dim": 32}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Llama", {"rope_parameters": YARN}),
    ("Llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("Mistral", {"sliding_window": 7}),
    ("Mistral", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("Qwen2", {}),
    ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    ("Qwen2", WINDOW),
    ("Qwen3", {}),
    ("Qwen3", WINDOW | {"head_dim": 32, "rope_parameters": YARN, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "values"), CASES)
def test_logits_are_those_of_transformers(family: str, values: dict[str, Any], tmp_path: Path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SMALL | values))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    for parameter in model.parameters():  # biases and norms are constants otherwise
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 48))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    llm = LLM(tmp_path, dtype="float32", max_num_batched_tokens=128, kv_pool="8MiB", progress=False)
    np.testing.assert_allclose(llm.logits(ids), expected, atol=2e-3 * np.abs(expected).max(), rtol=0)
    prompts = [ids[0], ids[1, :20], ids[1, :5]]
    outputs = llm.generate(prompt_token_ids=prompts, sampling=SamplingParams(max_tokens=12, early_stop=False))
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            whole = model.generate(
                torch.from_numpy(prompt[None]), do_sample=False, max_new_tokens=12, eos_token_id=None
            )
        assert output.token_ids == whole[0, len(prompt) :].tolist()
