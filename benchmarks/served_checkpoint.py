"""Checkpoints with random weights that a server can open: with a tokenizer, and with the family's sampler."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.random_checkpoint import HF_CONFIGS, write_random_checkpoint
from benchmarks.shapes import SHAPES
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import GENERATION_CONFIG

SERVED = tuple(shape for shape, config in SHAPES.items() if config.family in HF_CONFIGS)
"""The shapes that such checkpoints are written of."""

DEFAULTS = {"dream": {"alg": "entropy"}}
"""Sampling parameters of a family where a request names none: Dream commits by its timetable, in the order
that its published examples ask for."""


def write_served_checkpoint(directory: Path, config: ModelConfig) -> None:
    """Write a checkpoint of a shape in bfloat16.

    Arguments:
    - `directory`: created; must not exist.
    - `config`: of a family in `HF_CONFIGS`.
    """
    write_random_checkpoint(directory, HF_CONFIGS[config.family](config))
    write_tokenizer(directory, config)
    if config.family in DEFAULTS:
        (directory / GENERATION_CONFIG).write_text(json.dumps(DEFAULTS[config.family]))


def write_tokenizer(directory: Path, config: ModelConfig) -> None:
    """A tokenizer in which each id is a word, so that streams have text."""
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.decoder = Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
