"""Weights that a few rows are multiplied with: what counts is how fast they stream from memory."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jdllm.pallas.skinny_matmul import skinny_matmul, streams

Stack = Float[Array, "layers outputs inputs"]
Products = tuple[Float[Array, "rows outputs"], ...]

_PROJECTIONS, _GATES = ("q", "k", "v"), ("gate", "up")


class Streamed(NamedTuple):
    """Weights of all layers of a stack, and the place of one layer.

    The stack is never sliced by layer: an operator that is no XLA product would be given a copy.

    - `projections`: of queries, keys and values; `None` where they differ in shape.
    - `gates`: the gate and the other half of the feed-forward layer; `None` in a layer with experts.
    """

    projections: dict[str, Stack] | None
    gates: tuple[Stack, Stack] | None
    place: Int[Array, ""] | int

    def of_layer(self, place: Int[Array, ""] | int) -> "Streamed":
        """The weights of the layer at `place` in the stack."""
        return self._replace(place=place)

    def project(self, x: Float[Array, "rows hidden"], names: tuple[str, ...]) -> Products:
        """Products of normed rows with some of the projections."""
        assert self.projections is not None
        return skinny_matmul(x, [self.projections[name] for name in names], layer=self.place)

    def gated(self, x: Float[Array, "rows hidden"]) -> Float[Array, "rows ffn"]:
        """silu(gate x) * up x."""
        assert self.gates is not None
        return skinny_matmul(x, self.gates, layer=self.place, gated=True)[0]


def streamed_of(stack: dict[str, Array], rows: int) -> Streamed | None:
    """Take the weights that `rows` rows had better stream out of a stack of layers; `None` for none.

    Outputs that are added to the residual are not among them: their products have too few columns to keep
    all processors busy without partial sums, and XLA's are faster.
    """

    def take(names: tuple[str, ...]) -> dict[str, Stack] | None:
        weights = [stack[name] for name in names if name in stack]
        if len(weights) < len(names) or len({w.shape for w in weights}) > 1:
            return None
        x = jax.ShapeDtypeStruct((rows, weights[0].shape[2]), weights[0].dtype)
        return {name: stack.pop(name) for name in names} if streams(x, weights) else None

    projections, gates = take(_PROJECTIONS), take(_GATES)
    if projections is None and gates is None:
        return None
    return Streamed(projections, None if gates is None else (gates["gate"], gates["up"]), 0)
