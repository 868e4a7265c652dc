"""The model configuration that every family is translated into."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from jdllm.errors import ConfigError
from jdllm.models.quantization import quantization_of
from jdllm.models.rotary import RopeConfig
from jdllm.noise import LANES
from jdllm.quantised import SHIFTED_GROUP, WeightForm
from jdllm.stored_rows import KvCacheDtype

LARGEST_SIZE = 2**31 - 1
"""No size or id is larger: devices count in 32 bits."""

MOST_LAYERS = MOST_EXPERTS = 4096
"""Every layer and expert has tensors whose names are listed before anything is read."""

ID_UNIT = 2 * LANES
"""The ids of a card are a multiple: noise is drawn for two ids at a time (`jdllm.noise.id_bits`)."""

_LARGEST_HEAD = 1 << 16


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Feed-forward layers made of experts, of which every row uses a few (`jdllm.models.moe.route`).

    - `experts`: experts in a layer.
    - `top_k`: experts that a row uses: those of its highest scores.
    - `expert_size`: inner width of an expert.
    - `expert_bias`: a bias is added to the scores before the choice.
    - `dense_layers`: indices of layers without experts, rising; their width is `intermediate_size`.
    - `score`: what makes scores of the router's logits: "softmax" over all experts, or "sigmoid".
    - `bias_weighs`: the weights are scores with the bias, otherwise without it.
    - `groups`, `kept_groups`: how many equal groups of neighbours the experts form, and of how many groups
      a row may use experts: of those whose two highest scores have the largest sums.
    - `normalized`: the weights of a row are divided by their sum.
    - `scale`: what the weights are multiplied by.
    - `shared_size`: inner width of an expert that every row uses, unweighted; 0 where there is none.
    """

    experts: int
    top_k: int
    expert_size: int
    expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()
    score: str = "softmax"
    bias_weighs: bool = True
    groups: int = 1
    kept_groups: int = 1
    normalized: bool = False
    scale: float = 1.0
    shared_size: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and behaviour of one transformer. Hashable: a static argument of every executable.

    Families differ in these values and in their weight names only. Sizes count elements; `vocab_size`
    is the number of embedding rows, which may exceed the tokenizer's length. Ids and the weights' `dtype`
    are `None` where the checkpoint does not state them.

    - `qkv_bias`: query, key and value projections have a bias.
    - `qk_norm`: queries and keys are normed per head, before the rotary embedding.
    - `attention`: the name of a way of generating in `jdllm.serving.modes.registry`. In "causal" models a
      row sees itself and those before it, in "block_causal" models its block and those before it, otherwise
      all (`jdllm.models.visibility.key_ranges`).
    - `block_length`: rows of a block of a block-causal model. Blocks are counted from position 0.
    - `causal_context`: the finished rows of a block-causal model see themselves and those before them. Blocks
      are counted from where the prompt ends, and only the rows of a block that is being filled see it whole.
    - `sliding_window`: a row of a causal model sees the latest so many rows, itself included.
    - `logits_shift`: the logits of row j - 1 predict token j; row 0 predicts itself.
    - `moe`: of a mixture of experts.
    - `more_eos_ids`: end a text as `eos_id` does; `eos_id` is the first that the checkpoint states.
    - `cards`: on how many cards each step runs (`jdllm.models.cards`). Sizes are those of the whole model,
      unless `on_card` has made the configuration.
    - `own_ids`: rows of the embedding and of the head on one of these cards; behind the last id they are
      zeros. `None` for all ids.
    - `kv_copies`: of one card's part: how many cards have its key-value heads, each with other queries.
    - `quantization`: the form of the matrices of layers on the device (`jdllm.quantised`). `None` for
      matrices of the same type as all other weights.
    - `in_int8`: leaves of these matrices, such as "v", that are in "int8" beside those in `quantization`.
    - `kv_cache_dtype`: how keys and values are stored on the device (`jdllm.stored_rows`): "auto" for the
      type of the model, "fp8" for floats of 8 bits with a scale for each row and head.
    - `offloaded`: of how many layers the weights are in host memory. These are the last ones, and none of
      `dense_layers` is among them.
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
    attention: str = "full"
    block_length: int | None = None
    causal_context: bool = False
    sliding_window: int | None = None
    logits_shift: bool = False
    moe: MoeConfig | None = None
    mask_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    more_eos_ids: tuple[int, ...] = ()
    eot_id: int | None = None
    dtype: str | None = None
    token_limit: int | None = None
    cards: int = 1
    own_ids: int | None = None
    kv_copies: int = 1
    quantization: WeightForm | None = None
    in_int8: tuple[str, ...] = ()
    kv_cache_dtype: KvCacheDtype = "auto"
    offloaded: int = 0

    def on_card(self) -> "ModelConfig":
        """The part that each of `cards` cards has: as many layers, and a part of heads, widths and ids.

        Where there are fewer key-value heads than cards, a card has one, and shares it with others.

        Raises `ConfigError` where a size is no multiple of the cards; the cards may be a multiple of the
        key-value heads.
        """
        moe, cards = self.moe, self.cards
        names = ["num_heads", "num_kv_heads", "intermediate_size"]
        copies = 1 if cards % self.num_kv_heads else cards // self.num_kv_heads
        sizes = {name: getattr(self, name) for name in names}
        sizes["num_kv_heads"] *= copies
        if moe is not None:
            sizes |= {"expert_size": moe.expert_size, "shared_size": moe.shared_size}
        for name, size in sizes.items():
            if size % cards:
                raise ConfigError(f"{name} is {size}, of which {cards} cards cannot have equal parts")
        parts = {name: sizes[name] // cards for name in names} | {"kv_copies": copies}
        if moe is not None:
            widths = {name: sizes[name] // cards for name in ("expert_size", "shared_size")}
            parts["moe"] = dataclasses.replace(moe, **widths)
        if cards > 1:
            parts["own_ids"] = -(-self.vocab_size // (cards * ID_UNIT)) * ID_UNIT
        return dataclasses.replace(self, **parts)

    def quantised(self, form: WeightForm | None, in_int8: tuple[str, ...] = ()) -> "ModelConfig":
        """The model with the matrices of its layers in this form, and some leaves in "int8".

        Raises `ConfigError` for several cards, and in 4 bits for inputs that are no multiple of 2 (int4) or
        of 32 (uint4).
        """
        inputs = {"hidden_size": self.hidden_size, "num_heads * head_dim": self.num_heads * self.head_dim}
        if self.moe is None or self.moe.dense_layers:
            inputs["intermediate_size"] = self.intermediate_size
        if self.moe is not None:
            inputs |= {"expert_size": self.moe.expert_size, "shared_size": self.moe.shared_size}
        unit = {"int4": 2, "uint4": SHIFTED_GROUP}.get(form or "", 1)
        odd = [f"{name} is {size}" for name, size in inputs.items() if size % unit]
        if form is not None and self.cards > 1:
            reason = f"one device, and devices is {self.cards}"
        elif odd:
            reason = f"numbers of inputs that are multiples of {unit}, and {odd[0]}"
        else:
            return dataclasses.replace(self, quantization=form, in_int8=in_int8)
        raise ConfigError(f"quantization is {form!r}, which is for {reason}")

    def form_of(self, leaf: str) -> WeightForm | None:
        """The form of a leaf of matrices of layers."""
        return "int8" if leaf in self.in_int8 else self.quantization

    @property
    def forms(self) -> tuple[WeightForm, ...]:
        """The forms that leaves have."""
        forms = self.quantization, "int8" if self.in_int8 else None
        return tuple(form for form in dict.fromkeys(forms) if form is not None)

    @property
    def in_order(self) -> bool:
        """Whether each token is generated from the tokens before it alone; other models fill masks."""
        return self.attention == "causal"

    @property
    def scored_in_order(self) -> bool:
        """Whether a likelihood is that of each token given the tokens before it, by rows that see as those of
        a causal model."""
        return self.in_order or self.causal_context

    @property
    def in_parts(self) -> bool:
        """Whether what is stored of a row never grows old, so that sequences are evaluated in parts."""
        return self.in_order or self.attention == "block_causal"

    @property
    def defined_ids(self) -> int:
        """Ids below this one have a meaning: the ids of the tokenizer, if its length is known."""
        return min(self.token_limit or self.vocab_size, self.vocab_size)

    @property
    def attention_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.head_dim**-0.5

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids of the end of sequence, in the checkpoint's order."""
        return () if self.eos_id is None else (self.eos_id, *self.more_eos_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text: all ends of sequence and, where the model has one, end of turn."""
        turn_end = () if self.eot_id is None else (self.eot_id,)
        return tuple(dict.fromkeys(self.eos_ids + turn_end))


class HfFields:
    """Typed access to a parsed `config.json`: every failure names the key and what would be right.

    Arguments:
    - `values`, `family`: the parsed file, and whose it is, for messages.
    - `defaults`: values that the published configuration class has for keys that are absent (a null is
      not absent).
    - `file`: its name.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        family: str,
        defaults: Mapping[str, Any] | None = None,
        file: str = "config.json",
    ):
        self._given = values
        self._defaults = defaults or {}
        self._values = {**self._defaults, **values}
        self._family = family
        self._file = file

    def get[T](self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key` as `kind`; `default` where it is absent or null, an error if there is none."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self._file} of a {self._family} model lacks {key!r} ({kind.__name__})")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) <= LARGEST_SIZE else math.inf
        boolean, finite = isinstance(value, bool), not isinstance(value, float) or math.isfinite(value)
        if not isinstance(value, kind) or not finite or (boolean and kind is int):
            self._refuse(key, f"expected a value of type {kind.__name__}")
        return cast(T, value)

    def size(self, key: str, default: int | None = None, *, most: int = LARGEST_SIZE) -> int:
        """A positive integer of at most `most`."""
        value = self.get(key, int, default)
        if not 0 < value <= most:
            self._refuse(key, f"expected a positive integer of at most {most}")
        return value

    def size_or_none(self, key: str) -> int | None:
        """A positive integer; `None` where the key is null, or absent and without a default."""
        return None if self._values.get(key) is None else self.size(key)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self.get(key, float, default)
        if value <= 0:
            self._refuse(key, "expected a number above 0")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids: of a list (as `eos_token_id` may be) all, once each; none where it is null or absent."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i <= LARGEST_SIZE:
                self._refuse(key, "expected a token id")
        return tuple(dict.fromkeys(ids))

    def token_id(self, key: str) -> int | None:
        """A token id, or `None`; of a list of ids the first."""
        return next(iter(self.token_ids(key)), None)

    def dtype(self) -> str | None:
        """The weights' type by `dtype` or `torch_dtype` (its older name), or `None`."""
        key = "dtype" if self._values.get("dtype") is not None else "torch_dtype"
        value = self._values.get(key)
        if value in (None, "bfloat16", "float16", "float32"):
            return value
        self._refuse(key, "expected bfloat16, float16 or float32")

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a feature that the transformer does not have; null is allowed where there is no default."""
        value = self._values.get(key)
        if value not in allowed and (value is not None or key in self._defaults):
            known = f" (supported: {', '.join(map(repr, allowed))})"
            self._refuse(key, f"which jdllm's {self._family} does not support{known}")

    def check_quantized(self) -> None:
        """Refuse quantised weights that jdllm does not read; the message names their method."""
        quantization_of(self._values, self._file)

    def refuse(self, key: str, reason: str) -> None:
        """Refuse a key that holds anything but null, an empty object or list, or false."""
        if self._values.get(key):
            raise ConfigError(f"{self._file} has {key}: {reason}")

    def require_each(self, key: str, allowed: str, layers: int) -> None:
        """Refuse a list that has not `allowed` once for each layer; it may be null or absent."""
        if self._values.get(key) is None:
            return
        values = self.get(key, list)
        for value in values:
            if value != allowed:
                raise ConfigError(
                    f"{self._file}: {key} has {value!r}, which jdllm's {self._family} does not support"
                    f" here (supported: {allowed!r} for every layer)"
                )
        if len(values) != layers:
            raise ConfigError(
                f"{self._file}: {key} has {len(values)} entries, expected one for each of the {layers} layers"
            )

    def head_layout(self, heads_key: str, kv_heads_key: str, hidden_key: str) -> tuple[int, int, int]:
        """(query heads, key-value heads, head size), checked to divide as the layout demands."""
        heads = self.size(heads_key)
        kv_heads = self.size(kv_heads_key, heads)
        hidden = self.size(hidden_key)
        head_dim = self.size("head_dim", max(hidden // heads, 1), most=_LARGEST_HEAD)
        if heads % kv_heads:
            raise ConfigError(
                f"{self._file}: {heads_key} {heads} is no multiple of {kv_heads_key} {kv_heads}"
            )
        if self._values.get("head_dim") is None and hidden % heads:
            raise ConfigError(f"{self._file}: {hidden_key} {hidden} is no multiple of {heads_key} {heads}")
        return heads, kv_heads, head_dim

    def _refuse(self, key: str, expected: str) -> NoReturn:
        whose = "" if key in self._given else " (the published default where it is absent)"
        raise ConfigError(f"{self._file}: {key} is {self._values.get(key)!r}{whose}, {expected}")
