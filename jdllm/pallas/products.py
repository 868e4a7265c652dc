"""Products of operands in registers, on the tensor cores or in an interpreter."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jdllm.pallas.widening import widened
from jdllm.quantised import in_order

Output = Float[Array, "warpgroup_rows head_dim"]
Scores = Float[Array, "warpgroup_rows block_keys"]
Sums = Float[Array, "columns rows"]
Weights = Float[Array, "columns depth"]
Result = TypeVar("Result")


class Products(Protocol):
    """How a warpgroup attends; `q`, `keys` and `values` are references to tiles in shared memory."""

    @staticmethod
    def scores(q: Any, keys: Any, issued: Callable[[], None]) -> Scores:
        """f32 scores of all rows and keys; calls `issued` once they are on their way."""
        ...

    @staticmethod
    def accumulate(o: Output, p: Scores, values: Any) -> Output:
        """`o` plus the product of `p` and `values`."""
        ...

    @staticmethod
    def both(
        q: Any,
        keys: Any,
        o: Output,
        p: Scores,
        values: Callable[[], Any],
        issued: Callable[[], None],
        use: Callable[[Scores], Result],
        like: Result,
    ) -> tuple[Output, Result]:
        """`accumulate`, and beside it what `use` makes of `scores`.

        Arguments:
        - `values`: called before the values are needed.
        - `issued`: called once both products are on their way.
        - `use`: called while `accumulate` is under way.
        - `like`: arrays of the shapes and types of its result.
        """
        ...


class Widening(Protocol):
    """How a warpgroup multiplies 64 columns of weights of 8 bits with rows; all sums are f32."""

    @staticmethod
    def zeros(shape: tuple[int, int]) -> Sums:
        """Sums of nothing."""
        ...

    @staticmethod
    def widened(weights: Any, dtype: jnp.dtype) -> Weights:
        """A tile of weights in shared memory, in the order of `jdllm.quantised`, as an operand of `dtype` in
        registers, in the order of the inputs."""
        ...

    @staticmethod
    def add_product(sums: Sums, weights: Weights, rows: Any) -> Sums:
        """`sums` plus the product of `weights` with each of the `rows`, a tile in shared memory."""
        ...


class TensorCores:
    """Products on the tensor cores (wgmma)."""

    @staticmethod
    def zeros(shape: tuple[int, int]) -> Sums:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    @staticmethod
    def widened(weights: Any, dtype: jnp.dtype) -> Weights:
        return widened(plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_2X), dtype)

    @staticmethod
    def add_product(sums: Sums, weights: Weights, rows: Any) -> Sums:
        return TensorCores.accumulate(sums, weights, rows.transpose((1, 0)))

    @staticmethod
    def scores(q: Any, keys: Any, issued: Callable[[], None]) -> Scores:
        def multiply(accumulator: Any) -> Scores:
            plgpu.wgmma(accumulator, q, keys.transpose((1, 0)))
            issued()
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((q.shape[0], keys.shape[0])))

    @staticmethod
    def accumulate(o: Output, p: Scores, values: Any) -> Output:
        def multiply(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, p, values)

        accumulator: Any = plgpu.WGMMAAccumulatorRef.init(o)
        return pl.run_state(multiply)(accumulator)

    @staticmethod
    def both(
        q: Any,
        keys: Any,
        o: Output,
        p: Scores,
        values: Callable[[], Any],
        issued: Callable[[], None],
        use: Callable[[Scores], Result],
        like: Result,
    ) -> tuple[Output, Result]:
        leaves, tree = jax.tree.flatten(like)

        def multiply(refs: tuple[Any, ...]) -> None:
            scores_ref, o_ref, *results = refs
            plgpu.wgmma(scores_ref, q, keys.transpose((1, 0)))
            plgpu.wgmma(o_ref, p, values())
            issued()
            used = use(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            for ref, value in zip(results, jax.tree.leaves(used), strict=True):
                ref[...] = value

        zeros = TensorCores.zeros((q.shape[0], keys.shape[0]))
        accumulators: tuple[Any, ...] = tuple(plgpu.WGMMAAccumulatorRef.init(x) for x in (zeros, o))
        _, o, *results = pl.run_state(multiply)((*accumulators, *leaves))
        return o, jax.tree.unflatten(tree, results)


class Interpreted:
    """The same for the interpreter, which has no products of operands in registers.

    Copies must not overtake its reads of shared memory, of which the tensor cores' are no example.
    """

    @staticmethod
    def zeros(shape: tuple[int, int]) -> Sums:
        return jnp.zeros(shape, jnp.float32)

    @staticmethod
    def widened(weights: Any, dtype: jnp.dtype) -> Weights:
        return in_order(weights[...]).astype(dtype)

    @staticmethod
    def add_product(sums: Sums, weights: Weights, rows: Any) -> Sums:
        contract = (((1,), (1,)), ((), ()))
        sums = sums + lax.dot_general(weights, rows[...], contract, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return sums

    @staticmethod
    def scores(q: Any, keys: Any, issued: Callable[[], None]) -> Scores:
        contract = (((1,), (1,)), ((), ()))
        scores = lax.dot_general(q[...], keys[...], contract, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        issued()
        return scores

    @staticmethod
    def accumulate(o: Output, p: Scores, values: Any) -> Output:
        o = o + jnp.dot(p, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return o

    @staticmethod
    def both(
        q: Any,
        keys: Any,
        o: Output,
        p: Scores,
        values: Callable[[], Any],
        issued: Callable[[], None],
        use: Callable[[Scores], Result],
        like: Result,
    ) -> tuple[Output, Result]:
        del like
        scores = Interpreted.scores(q, keys, lambda: None)
        o = Interpreted.accumulate(o, p, values())
        issued()
        return o, use(scores)
