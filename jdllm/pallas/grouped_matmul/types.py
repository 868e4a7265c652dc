"""The arrays of every grouped product."""

from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor

X = Float[Array, "rows k"]
Weights = Float[Array, "all_groups k n"]
Gate = Float[Array, "all_groups k n"] | None
GroupSizes = Int[Tensor, " groups"]
FirstGroup = Int[Tensor, ""] | int
Product = Float[Array, "rows n"]
