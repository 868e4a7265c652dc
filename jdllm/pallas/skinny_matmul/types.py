"""The arrays of every product of a few rows."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float, Float32, Int

from jdllm.quantised import Quantised, Shifted

X = Float[Array, "rows k"]
Stack = Float[Array, "layers n k"]
Weight = Stack | Quantised
Layer = Int[Array, ""] | int
Product = Float[Array, "rows n"]
Rotation = tuple[Float32[Array, "rows pairs"], Float32[Array, "rows pairs"]]
Bias = Float[Array, "layers outputs"]


def head_dim_of(rotation: Rotation | None) -> int | None:
    """The size of the heads that are rotated, if any are."""
    return None if rotation is None else 2 * rotation[0].shape[1]


def kind_of(weights: Sequence[Any]) -> type[Quantised] | None:
    """The kind of these weights, `None` of those that are not quantised. Raises `NotImplementedError` where
    some are unlike others."""
    kinds = {type(weight) if isinstance(weight, Quantised) else None for weight in weights}
    if len(kinds) > 1:
        raise NotImplementedError("products of a few rows take weights that are all quantised alike, or none")
    return kinds.pop()


def unpacked(weights: Sequence[Weight]) -> tuple[list[Array], list[list[Array]]]:
    """The numbers that are stored of weights, and scales, then offsets, of those that are quantised."""
    values = [weight.values if isinstance(weight, Quantised) else weight for weight in weights]
    quantised = [weight for weight in weights if isinstance(weight, Quantised)]
    return values, [
        [weight.scales, *([weight.offsets] if isinstance(weight, Shifted) else [])] for weight in quantised
    ]
