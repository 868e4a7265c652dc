"""The model configuration that every family is translated into."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from jdllm.errors import ConfigError
from jdllm.json_files import read_object
from jdllm.models.rotary import RopeConfig


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Feed-forward layers made of experts, of which every row uses a few.

    - `experts`: experts in a layer.
    - `top_k`: experts that a row uses: those of its largest router probabilities, which weigh them unscaled.
    - `expert_size`: inner width of an expert.
    - `expert_bias`: a bias is added to the router probabilities, before the choice and in the weights.
    - `dense_layers`: indices of layers without experts, rising; their width is `intermediate_size`.
    """

    experts: int
    top_k: int
    expert_size: int
    expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and behaviour of one transformer. Hashable: a static argument of every executable.

    Families differ in these values and in their weight names only. Sizes count elements; `vocab_size`
    is the number of embedding rows, which may exceed the tokenizer's length. Ids and the weights' `dtype`
    are `None` where the checkpoint does not state them.

    - `qkv_bias`: query, key and value projections have a bias.
    - `qk_norm`: queries and keys are normed per head, before the rotary embedding.
    - `attention`: which rows see each other; `jdllm.models.visibility.key_ranges` turns it into ranges.
    - `sliding_window`: a row of a causal model sees the latest so many rows, itself included.
    - `logits_shift`: the logits of row j - 1 predict token j; row 0 predicts itself.
    - `moe`: of a mixture of experts.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    attention: Literal["full", "causal"] = "full"
    sliding_window: int | None = None
    logits_shift: bool = False
    moe: MoeConfig | None = None
    mask_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    dtype: str | None = None
    token_limit: int | None = None

    @property
    def defined_ids(self) -> int:
        """Ids below this one have a meaning: those of the tokenizer, where its length is known."""
        return min(self.token_limit or self.vocab_size, self.vocab_size)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text: end of sequence and, where the model has one, end of turn."""
        return tuple(dict.fromkeys(i for i in (self.eos_id, self.eot_id) if i is not None))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | Path) -> "ModelConfig":
        """Translate a Hugging Face configuration.

        Arguments:
        - `config`: the parsed `config.json`, its path, or the directory that holds it.

        Returns the configuration of a registered family.

        Raises `ConfigError` for an unreadable file, an unknown family or a feature that the family's
        transformer does not have.
        """
        from jdllm.models.registry import family_of

        values = config if isinstance(config, Mapping) else read_config(Path(config))
        return family_of(values).config_from_hf(values)


def read_config(path: Path) -> dict[str, Any]:
    """Read `config.json` at `path`, a file or the directory that holds it; `ConfigError` if unreadable."""
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"no config.json at {path.parent}: expected a Hugging Face model directory")
    return read_object(path, ConfigError)


class HfFields:
    """Typed access to a parsed `config.json`: every failure names the key and what would be right."""

    def __init__(self, values: Mapping[str, Any], family: str):
        self._values = values
        self._family = family

    def get[T](self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key` as `kind`; `default` where it is absent or null, an error if there is none."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"config.json of a {self._family} model lacks {key!r} ({kind.__name__})")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        boolean, finite = isinstance(value, bool), not isinstance(value, float) or math.isfinite(value)
        if not isinstance(value, kind) or not finite or (boolean and kind is int):
            raise ConfigError(f"config.json: {key} is {value!r}, expected a value of type {kind.__name__}")
        return cast(T, value)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, int, default)
        if value <= 0:
            raise ConfigError(f"config.json: {key} is {value}, expected a positive integer")
        return value

    def token_id(self, key: str) -> int | None:
        """A token id, or `None`; of a list of ids (as `eos_token_id` may be) the first."""
        value = self._values.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise ConfigError(f"config.json: {key} is {value!r}, expected a token id")

    def dtype(self) -> str | None:
        """The weights' type by `dtype` or `torch_dtype` (its older name), or `None`."""
        key = "dtype" if self._values.get("dtype") is not None else "torch_dtype"
        value = self._values.get(key)
        if value in (None, "bfloat16", "float16", "float32"):
            return value
        raise ConfigError(f"config.json: {key} is {value!r}, expected bfloat16, float16 or float32")

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a feature that the transformer does not have."""
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"config.json: {key} is {value!r}, which jdllm's {self._family} does not support"
                f" (supported: {', '.join(map(repr, allowed))})"
            )

    def require_each(self, key: str, allowed: str) -> None:
        """Refuse a list (of one entry per layer) with any entry but `allowed`; it may be absent."""
        for value in self.get(key, list, []):
            if value != allowed:
                raise ConfigError(
                    f"config.json: {key} has {value!r}, which jdllm's {self._family} does not support"
                    f" here (supported: {allowed!r})"
                )

    def head_layout(self, heads_key: str, kv_heads_key: str, hidden_key: str) -> tuple[int, int, int]:
        """(query heads, key-value heads, head size), checked to divide as the layout demands."""
        heads = self.size(heads_key)
        kv_heads = self.size(kv_heads_key, heads)
        hidden = self.size(hidden_key)
        head_dim = self.size("head_dim", max(hidden // heads, 1))
        if heads % kv_heads:
            raise ConfigError(f"config.json: {heads_key} {heads} is no multiple of {kv_heads_key} {kv_heads}")
        if self._values.get("head_dim") is None and hidden % heads:
            raise ConfigError(f"config.json: {hidden_key} {hidden} is no multiple of {heads_key} {heads}")
        return heads, kv_heads, head_dim
