"""The arrays of every product of a few rows."""

from jaxtyping import Array, Float, Float32, Int

X = Float[Array, "rows k"]
Stack = Float[Array, "layers n k"]
Layer = Int[Array, ""] | int
Product = Float[Array, "rows n"]
Rotation = tuple[Float32[Array, "rows pairs"], Float32[Array, "rows pairs"]]
Bias = Float[Array, "layers outputs"]


def head_dim_of(rotation: Rotation | None) -> int | None:
    """The size of the heads that are rotated, if any are."""
    return None if rotation is None else 2 * rotation[0].shape[1]
