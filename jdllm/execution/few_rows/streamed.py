"""Weights that a few rows are multiplied with: what counts is how fast they stream from memory."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jdllm.pallas.device import target
from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.pallas.skinny_matmul.limits import SKINNY_MATMUL
from jdllm.quantised import Quantised

Stack = Float[Array, "layers outputs inputs"] | Quantised

_TOGETHER = (("q", "k", "v"), ("gate", "up"))


class Streamed(NamedTuple):
    """Weights of all layers of a stack by name, and the place of one layer.

    The stack is never sliced by layer: an operator that is no XLA product would be given a copy.
    """

    weights: dict[str, Stack]
    place: Int[Array, ""] | int

    def of_layer(self, place: Int[Array, ""] | int) -> "Streamed":
        """The weights of the layer at `place` in the stack."""
        return self._replace(place=place)

    def products(
        self, x: Float[Array, "rows inputs"], names: tuple[str, ...], *, gated: bool = False
    ) -> tuple[Float[Array, "rows outputs"], ...]:
        """`jdllm.pallas.skinny_matmul.skinny_matmul` of rows with some of the layer's weights."""
        return skinny_matmul(x, [self.weights[name] for name in names], layer=self.place, gated=gated)


def streamed_of(stack: dict[str, Any], rows: int) -> Streamed | None:
    """Take the weights that `rows` rows had better stream out of a stack of layers; `None` for none.

    The weights of queries, keys and values are among them, and the weights of a gate. Outputs that are added
    to the residual are not: they are too few to keep all processors busy without partial sums, and XLA's
    products are faster.
    """
    weights: dict[str, Stack] = {}
    for names in _TOGETHER:
        found = [stack[name] for name in names if name in stack]
        if len(found) < len(names):
            continue
        x = jax.ShapeDtypeStruct((rows, found[0].shape[2]), stack["attn_norm"].dtype)
        if SKINNY_MATMUL.default(target(), x, found).language != "xla":
            weights |= {name: stack.pop(name) for name in names}
    return Streamed(weights, 0) if weights else None
