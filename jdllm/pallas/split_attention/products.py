"""The two products of attention, with the left operand in registers."""

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

Query = Float[Array, "warpgroup_rows head_dim"]
Scores = Float[Array, "warpgroup_rows keys"]


class Products(Protocol):
    """How a warpgroup multiplies."""

    @staticmethod
    def scores(q: Query, keys: Any, issued: Callable[[], None]) -> Scores:
        """f32 scores of `q` and all of `keys`; calls `issued` once while they are computed."""
        ...

    @staticmethod
    def accumulate(o: Query, p: Scores, values: Any) -> Query:
        """`o` plus the product of `p` and all of `values`."""
        ...


class TensorCores:
    """Products on the tensor cores (wgmma)."""

    @staticmethod
    def scores(q: Query, keys: Any, issued: Callable[[], None]) -> Scores:
        def multiply(accumulator: Any) -> Scores:
            plgpu.wgmma(accumulator, q, keys.transpose((1, 0)))
            issued()
            return accumulator[...]

        shape = (q.shape[0], keys.shape[0])
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape))

    @staticmethod
    def accumulate(o: Query, p: Scores, values: Any) -> Query:
        def multiply(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, p, values)

        result: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(o))
        return result


class Interpreted:
    """The same for the interpreter, which has no products of operands in registers.

    Copies must not overtake its reads of shared memory, of which the tensor cores' are no example.
    """

    @staticmethod
    def scores(q: Query, keys: Any, issued: Callable[[], None]) -> Scores:
        scores = lax.dot_general(q, keys[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        issued()
        return scores

    @staticmethod
    def accumulate(o: Query, p: Scores, values: Any) -> Query:
        o = o + jnp.dot(p, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return o
