"""The bundled demo model: its tasks, tokenizer, training script and evaluation."""

from pathlib import Path


def checkpoint_path() -> Path:
    """The directory of the bundled checkpoint: `config.json`, `model.safetensors` and the tokenizer files."""
    return Path(__file__).parent / "checkpoint"
