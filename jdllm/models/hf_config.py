"""Hugging Face's `config.json` and `generation_config.json`, translated for any family that is registered."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jdllm.errors import ConfigError
from jdllm.gguf_files import is_gguf
from jdllm.json_files import read_object
from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.gguf_config import read_gguf_config
from jdllm.models.registry import family_of

GENERATION_CONFIG = "generation_config.json"
"""What a checkpoint says of generations, beside `config.json`."""


def config_from_hf(config: Mapping[str, Any] | str | Path) -> ModelConfig:
    """Translate a Hugging Face configuration.

    Arguments:
    - `config`: the parsed `config.json`, its path, or the directory that holds it.

    Returns the configuration of a registered family.

    Raises `ConfigError` for an unreadable file, an unknown family or a feature that the family's
    transformer does not have.
    """
    values = config if isinstance(config, Mapping) else read_config(Path(config))
    return family_of(values).config_from_hf(values)


def config_from_checkpoint(directory: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Translate the configuration of a checkpoint, with the ids that end its texts.

    Arguments:
    - `directory`: holds `config.json` and, perhaps, `generation_config.json`, whose `eos_token_id` adds
      to the ids of `config.json`.
    - `overrides`: keys that replace keys of `config.json`; with `eos_token_id`, no other ids count.

    Returns the configuration of a registered family.

    Raises `ConfigError` for what `config_from_hf` refuses, and for a `generation_config.json` that is no
    better.
    """
    overrides = overrides or {}
    config = config_from_hf({**read_config(directory), **overrides})
    path = directory / GENERATION_CONFIG
    if "eos_token_id" in overrides or not path.is_file():
        return config
    fields = HfFields(read_object(path, ConfigError), config.family, file=path.name)
    first, *more = (*config.eos_ids, *fields.token_ids("eos_token_id")) or (None,)
    return dataclasses.replace(config, eos_id=first, more_eos_ids=tuple(dict.fromkeys(more)))


def read_config(path: Path) -> dict[str, Any]:
    """Read `config.json` at `path`, a file or the directory that holds it; `ConfigError` if unreadable.

    Of a GGUF file its metadata tell the same (`read_gguf_config`).
    """
    if is_gguf(path):
        return read_gguf_config(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"no config.json at {path.parent}: expected a Hugging Face model directory")
    return read_object(path, ConfigError)
