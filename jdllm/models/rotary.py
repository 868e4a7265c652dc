"""Rotary position embedding: frequencies, and their scaling for longer contexts.

Frequencies are f32 with the rounding of the published models (each operation rounded to f32), because the
weights were trained with them: at position 100,000 an ulp of a frequency is a visible angle.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from jdllm.arrays import Tensor
from jdllm.errors import ConfigError

_POSITIONS_KEYS = ("max_position_embeddings", "max_sequence_length")
_NEED_ORIGINAL = ("yarn", "llama3")
_LARGEST = 1e12
_NO_DYNAMIC = (
    "config.json: rope_type 'dynamic' has other frequencies for every length, and jdllm has one set for all:"
    " up to the positions that the model states they are those of 'default', so leave rope_scaling away;"
    " for longer contexts state 'ntk' with the same factor"
)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one model. Hashable: part of the static model configuration.

    - `theta`: base of the frequencies.
    - `fraction`: part of each head that is rotated, from its first dimension on.
    - `kind`: a key of `KINDS`, the names that `rope_type` has in `config.json`.
    - `factor`: how much longer the context becomes; unused by "default".
    - `original_positions`: context before scaling, 0 if unknown; "yarn" and "llama3" need it.
    - `attention_factor`: multiplies cos and sin, hence its square the scores; other than 1 for "yarn" only.
    - `beta_fast`, `beta_slow`, `truncate`: rotations over the original context above which "yarn" keeps a
      frequency and below which it interpolates it, and whether these bounds are widened to whole dimensions.
    - `low_freq_factor`, `high_freq_factor`: the same bounds for "llama3".
    - `query_beta`: a rotated query at position p is multiplied by 1 + query_beta ln(1 + n), where n is how
      often `original_positions` goes into p.
    """

    theta: float
    fraction: float = 1.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    query_beta: float = 0.0

    def __post_init__(self):
        _check_kind(self.kind)
        if self.kind in _NEED_ORIGINAL and self.original_positions < 1:
            raise ConfigError(
                f"config.json: rope_type {self.kind!r} needs a positive original_max_position_embeddings"
            )
        if self.query_beta and self.original_positions < 1:
            raise ConfigError(
                "config.json: llama_4_scaling_beta needs a positive original_max_position_embeddings, and a"
                " rope_type that has it"
            )

    @classmethod
    def from_hf(
        cls, values: Mapping[str, Any], default_theta: float, *, partial: bool = True
    ) -> "RopeConfig":
        """Read the rotary part of a parsed `config.json`.

        Arguments:
        - `values`: the configuration; the base is `rope_theta`, scaling is `rope_scaling` (with `rope_type`
          or `type`) or `rope_parameters`, which may hold `rope_theta` and `partial_rotary_factor` too.
        - `default_theta`: the base where the configuration has none.
        - `partial`: the model's code can rotate a part of each head; otherwise it must be all of it.

        A LLaDA checkpoint trained for longer contexts (UltraLLaDA) carries its base in `rope_theta`, and its
        public evaluation changes nothing else. To extend a checkpoint without training, multiply `rope_theta`
        (as LongLLaDA does) or set `rope_scaling` to `{"rope_type": "ntk", "factor": longer / trained}`.

        Raises `ConfigError` for an unknown type, for "dynamic" (its frequencies change with the length of the
        sequence), for two objects that differ, and for a missing or impossible value.
        """
        scaling = _scaling_dict(values)
        kind = _kind(scaling)
        if kind == "dynamic":
            raise ConfigError(_NO_DYNAMIC)
        _check_kind(kind)
        number = _Numbers({**values, **{k: v for k, v in scaling.items() if v is not None}})
        theta = number("rope_theta", default_theta, above=1.0)
        fraction = number("partial_rotary_factor", 1.0, above=0.0)
        if fraction > 1:
            raise ConfigError(f"config.json: partial_rotary_factor is {fraction}, expected at most 1")
        if fraction < 1 and not partial:
            raise ConfigError(
                f"config.json: partial_rotary_factor is {fraction}, which this model's code does not have"
                " (it rotates whole heads: 1)"
            )
        if kind == "default":
            return cls(theta, fraction)
        number = _Numbers(scaling, f" of rope_type {kind!r}")
        original = _original_positions(values, scaling, kind)
        rope = cls(theta, fraction, kind, number("factor", at_least=1.0), original)
        if kind == "yarn":
            return _with_yarn(rope, scaling, number)
        if kind == "llama3":
            low, high = number("low_freq_factor", above=0.0), number("high_freq_factor", above=0.0)
            if high <= low:
                raise ConfigError(f"config.json: high_freq_factor {high} must exceed low_freq_factor {low}")
            return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)
        return rope

    def effective_context(self, max_positions: int) -> int:
        """The longest context in tokens that the scaling is meant for.

        Arguments:
        - `max_positions`: the positions that the configuration states.

        Returns factor x original context (`original_max_position_embeddings`, else the stated positions),
        and the stated positions themselves for "default" and for "llama3", whose configurations state the
        scaled context.
        """
        if self.kind in ("default", "llama3"):
            return max_positions
        return int(self.factor * (self.original_positions or max_positions))

    def rotated_dim(self, head_dim: int) -> int:
        """Rotated dimensions of a head; `ConfigError` where they cannot be paired."""
        dim = int(head_dim * self.fraction)
        if dim < 2 or dim % 2:
            raise ConfigError(
                f"config.json: {dim} of {head_dim} head dimensions are rotated, expected an even number"
            )
        return dim


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair.

    Arguments:
    - `rope`, `head_dim`: the embedding and the head size.

    Returns f32 `[rotated_dim / 2]`.
    """
    return KINDS[rope.kind](rope, rope.rotated_dim(head_dim))


class Rotation(NamedTuple):
    """How queries and keys of rows are turned.

    - `cos`, `sin`: of the angles of the rows, as `cos_sin` returns them.
    - `query_scale`: what rotated queries are multiplied by; `None` for 1.
    """

    cos: Float32[Array, "rows pairs"]
    sin: Float32[Array, "rows pairs"]
    query_scale: Float32[Array, " rows"] | None = None


def rotation_at(rope: RopeConfig, head_dim: int, positions: Int[Tensor, " rows"]) -> Rotation:
    """The rotation of rows at `positions`; arguments are those of `cos_sin`."""
    scale = None
    if rope.query_beta:
        periods = jnp.asarray(positions) // rope.original_positions
        scale = 1 + rope.query_beta * jnp.log1p(periods.astype(jnp.float32))
    return Rotation(*cos_sin(rope, head_dim, positions), scale)


def cos_sin(
    rope: RopeConfig, head_dim: int, positions: Int[Tensor, " rows"]
) -> tuple[Float32[Array, "rows pairs"], Float32[Array, "rows pairs"]]:
    """Cosine and sine of each row's angles.

    Arguments:
    - `rope`, `head_dim`: static.
    - `positions`: absolute positions, below 2^24 (exact in f32).

    Returns two f32 arrays `[rows, rotated_dim / 2]`, multiplied by the attention factor.
    """
    angles = jnp.asarray(positions, jnp.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def _periods(theta: float, dim: int) -> np.ndarray:
    """theta^(2i / dim) rounded to f32; the power itself in f64, so that it depends on no library's f32."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _default(rope: RopeConfig, dim: int) -> np.ndarray:
    return 1 / _periods(rope.theta, dim)


def _linear(rope: RopeConfig, dim: int) -> np.ndarray:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595)."""
    return _default(rope, dim) / np.float32(rope.factor)


def _ntk(rope: RopeConfig, dim: int) -> np.ndarray:
    """NTK-aware change of base: the lowest frequency is interpolated, the highest kept (YaRN, 3.1)."""
    return 1 / _periods(rope.theta * rope.factor ** _ntk_exponent(dim), dim)


def _ntk_exponent(dim: int) -> float:
    return dim / (dim - 2) if dim > 2 else 1.0


def _yarn(rope: RopeConfig, dim: int) -> np.ndarray:
    """NTK-by-parts interpolation (YaRN, Peng et al. 2023, arXiv 2309.00071, section 3.2)."""

    def pair_turning(rotations: float) -> float:
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    pair = np.arange(dim // 2, dtype=np.float32)
    keep = 1 - np.clip((pair - np.float32(low)) / np.float32(high - low), 0, 1)
    periods = _periods(rope.theta, dim)
    return keep * (1 / periods) + (1 - keep) * (1 / (np.float32(rope.factor) * periods))


def _llama3(rope: RopeConfig, dim: int) -> np.ndarray:
    """Interpolation by wavelength, as the Llama 3.1 reference code defines it."""
    inverse = _default(rope, dim)
    rotations = np.float32(rope.original_positions) / (np.float32(2 * math.pi) / inverse)
    band = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip((rotations - np.float32(rope.low_freq_factor)) / band, 0, 1)
    return (1 - keep) * inverse / np.float32(rope.factor) + keep * inverse


KINDS: dict[str, Callable[[RopeConfig, int], np.ndarray]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "yarn": _yarn,
    "llama3": _llama3,
}


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"config.json: rope_type is {kind!r}, expected one of {', '.join(KINDS)}")


class _Numbers:
    """Numbers of a parsed configuration, checked: every failure names the key and what would be right."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self._values = values
        self._where = where

    def __call__(
        self, key: str, default: float | None = None, *, above: float = -math.inf, at_least: float = -math.inf
    ) -> float:
        value = self._values.get(key)
        value = default if value is None else value
        limit = max(above, at_least)
        expected = (
            f"a number {'above' if above == limit else 'of at least'} {limit:g} and at most {_LARGEST:g}"
        )
        if value is None:
            raise ConfigError(f"config.json: {key}{self._where} is missing, expected {expected}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not -_LARGEST <= value <= _LARGEST or value <= above or value < at_least:
            raise ConfigError(f"config.json: {key}{self._where} is {value!r}, expected {expected}")
        return float(value)


def _scaling_dict(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_scaling` or `rope_parameters`; of an empty one nothing is taken."""
    given = {key: values[key] for key in ("rope_scaling", "rope_parameters") if values.get(key)}
    for key, scaling in given.items():
        if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
            raise ConfigError(f"config.json: {key} is {scaling!r}, expected one object with a rope_type")
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise ConfigError(
            "config.json has rope_scaling and rope_parameters, and they differ: transformers takes all of"
            " rope_scaling and nothing of rope_parameters; keep the one that is meant"
        )
    return next(iter(given.values()), {})


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = scaling.get("rope_type") or scaling.get("type")
    return "default" if kind is None and "factor" not in scaling else str(kind)


def _original_positions(values: Mapping[str, Any], scaling: Mapping[str, Any], kind: str) -> int:
    """For "yarn" and "llama3" a value beside the scaling goes before one in it, as in transformers."""
    key = "original_max_position_embeddings"
    beside = values.get(key) if kind in _NEED_ORIGINAL else None
    stated = None if kind == "llama3" else next((values[k] for k in _POSITIONS_KEYS if values.get(k)), None)
    number = _Numbers({key: beside or scaling.get(key) or stated}, f" of rope_type {kind!r}")
    return int(number(key, 0.0, at_least=0.0))


def _with_yarn(rope: RopeConfig, scaling: Mapping[str, Any], number: _Numbers) -> RopeConfig:
    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0

    if scaling.get("extrapolation_factor") not in (None, 1):
        raise ConfigError(
            f"config.json: extrapolation_factor of rope_type 'yarn' is {scaling['extrapolation_factor']!r},"
            " expected 1, or none"
        )
    if scaling.get("attn_factor") is not None and scaling.get("attention_factor") is not None:
        raise ConfigError(
            "config.json: rope_type 'yarn' has attn_factor, which multiplies the usual scale, and"
            " attention_factor, which takes its place: keep the one that is meant"
        )
    mscale, all_dim = (number(key, 0.0, at_least=0.0) for key in ("mscale", "mscale_all_dim"))
    usual = temperature(mscale) / temperature(all_dim) if mscale and all_dim else temperature(1.0)
    default = usual * number("attn_factor", 1.0, above=0.0)
    fast, slow = number("beta_fast", 32.0, above=0.0), number("beta_slow", 1.0, above=0.0)
    if fast < slow:
        raise ConfigError(f"config.json: beta_fast {fast:g} must not be below beta_slow {slow:g}")
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(
            f"config.json: truncate of rope_type 'yarn' is {truncate!r}, expected true or false"
        )
    return dataclasses.replace(
        rope,
        attention_factor=number("attention_factor", default, above=0.0),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
