"""The bundled demo models: their tasks, tokenizer, training script and evaluation."""

from pathlib import Path
from typing import Literal

Bundled = Literal["demo", "block", "retrieval"]

MAX_INSTANCES = 10_000
"""Of each task in one evaluation: all have that many, and what compares them with the training fits."""


def checkpoint_path(model: Bundled = "demo") -> Path:
    """The directory of a bundled checkpoint: `config.json`, `model.safetensors` and the tokenizer files.

    Arguments:
    - `model`: the demo model, its twin among block models, or the one that finds facts in long contexts.
    """
    return Path(__file__).parent / ("checkpoint" if model == "demo" else f"{model}_checkpoint")
