"""What the settings of a LoRA adapter say: which modules it changes, with which rank and scale.

The rules are those of PEFT 0.21.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jdllm.checkpoints.peft import CONFIG, FOLLOWED, checked_alpha, checked_rank, read_settings
from jdllm.errors import CheckpointError

_FOLLOWED = FOLLOWED | {
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
_ALL = "all-linear"


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """The settings of an adapter.

    - `rank`, `alpha`: of modules that no pattern of `ranks` and `alphas` names.
    - `stabilised`: the square root of the rank divides `alpha`, and not the rank.
    - `wanted`, `excluded`: modules with products and without: ends of their names, or a pattern for names.
    - `saved`: modules that the adapter has anew; their products are none.
    - `layers`: numbers of the layers with products, all if there are none; `stacks` are patterns for what the
      layers are called.
    """

    rank: int
    alpha: float
    stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    wanted: str | list[str]
    excluded: str | list[str]
    saved: list[str]
    layers: list[int]
    stacks: list[str]

    @property
    def all_linear(self) -> bool:
        """Whether all linear layers but the head have products."""
        return isinstance(self.wanted, str) and self.wanted.lower() == _ALL

    def product(self, module: str) -> tuple[int, float] | None:
        """Rank and scale of the product that a module has; `None` for a module without."""
        saved = any(re.match(rf"(^|.*\.){one}($|\..*)", module) for one in self.saved)
        if saved or _names(self.excluded, module) or not self._wants(module):
            return None
        rank, alpha = _found(self.ranks, module, self.rank), _found(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.stabilised else rank)

    def has_anew(self, tensor: str) -> bool:
        """Whether the adapter has a tensor of the model anew."""
        return any(f"{module}." in tensor for module in self.saved)

    def _wants(self, module: str) -> bool:
        if self.all_linear or isinstance(self.wanted, str):
            return self.all_linear or _names(self.wanted, module)
        return _names(self.wanted, module) and (not self.layers or self._layer(module) in self.layers)

    def _layer(self, module: str) -> int | None:
        """The number of the layer in which a module lies: the first number in its name."""
        patterns = [rf"(?:^|.*?\.){stack}\.(?P<number>\d+)\." for stack in self.stacks]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<number>\d+)\."]:
            if found := re.match(pattern, module):
                return int(found["number"])
        return None


def read_lora(directory: Path) -> LoraSettings:
    """Read the settings of an adapter.

    Raises `CheckpointError` for a directory without an adapter, and for settings that are damaged or not
    followed.
    """
    values, file = read_settings(directory, _FOLLOWED), directory / CONFIG
    ranks, alphas = (_object(file, values, key) for key in ("rank_pattern", "alpha_pattern"))
    layers = values.get("layers_to_transform")
    settings = LoraSettings(
        checked_rank(f"{file}: r", values.get("r")),
        checked_alpha(f"{file}: lora_alpha", values.get("lora_alpha")),
        bool(values.get("use_rslora")),
        {key: checked_rank(f"{file}: rank_pattern of {key}", value) for key, value in ranks.items()},
        {key: checked_alpha(f"{file}: alpha_pattern of {key}", value) for key, value in alphas.items()},
        _texts(file, values, "target_modules"),
        _texts(file, values, "exclude_modules"),
        _listed(_texts(file, values, "modules_to_save")),
        [layers] if isinstance(layers, int) else layers or [],
        _listed(_texts(file, values, "layers_pattern")),
    )
    if not isinstance(settings.layers, list) or not all(type(number) is int for number in settings.layers):
        raise CheckpointError(f"{file}: layers_to_transform is {layers!r}, expected numbers of layers")
    _check_patterns(file, settings)
    return settings


def _texts(file: Path, values: Mapping[str, Any], key: str) -> str | list[str]:
    found = values.get(key) or []
    if isinstance(found, str) or (isinstance(found, list) and all(isinstance(one, str) for one in found)):
        return found
    raise CheckpointError(f"{file}: {key} is {found!r}, expected names or a pattern")


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _object(file: Path, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key) or {}
    if isinstance(found, dict):
        return found
    raise CheckpointError(f"{file}: {key} is {found!r}, expected an object of patterns and values")


def _check_patterns(file: Path, settings: LoraSettings) -> None:
    whole = [one for one in (settings.wanted, settings.excluded) if isinstance(one, str)]
    for pattern in [*whole, *settings.ranks, *settings.alphas, *settings.saved, *settings.stacks]:
        try:
            re.compile(f"({pattern})")
        except re.error as e:
            raise CheckpointError(f"{file}: {pattern!r} is no regular expression: {e}") from None


def _names(wanted: str | list[str], module: str) -> bool:
    """Whether a pattern names a module, or one of several ends of names does."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(f".{module}".endswith(f".{end}") for end in wanted)


def _found[T](patterns: Mapping[str, T], module: str, other: T) -> T:
    """The value of the first pattern that the end of a module's name matches; `other` where none does."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), other)
