"""Products of operands in registers, on the tensor cores or in an interpreter."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jdllm.pallas.widening import (
    row_layout,
    scaled_pairs,
    shifted_pairs,
    widened,
    widened_pairs,
    widened_rows,
)
from jdllm.quantised import SHIFTED_GROUP, in_order, unpacked

Output = Float[Array, "warpgroup_rows head_dim"]
Scores = Float[Array, "warpgroup_rows block_keys"]
Sums = Float[Array, "columns rows"]
Result = TypeVar("Result")

_ROWS_AT_ONCE = 32
"""With more rows, weights of 4 bits without offsets take two products for a step: registers hold the sums of
the step beside those of all steps."""


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

    @staticmethod
    def widened(values: Any, scales: Any, dtype: jnp.dtype) -> Float[Array, "keys head_dim"]:
        """Rows that are stored in 8 bits as `jdllm.stored_rows.Float8Rows.wide` returns them.

        Arguments:
        - `values`, `scales`: tiles in shared memory: floats of 8 bits, and a power of two for each row.
        - `dtype`: bfloat16.
        """
        ...


class Widening(Protocol):
    """How a warpgroup multiplies 64 columns of quantised weights with rows; all sums are f32."""

    @staticmethod
    def zeros(shape: tuple[int, int]) -> Sums:
        """Sums of nothing."""
        ...

    @staticmethod
    def add_product(sums: Sums, weights: Any, rows: Any) -> Sums:
        """`sums` plus the product of each column with each row.

        Arguments:
        - `weights`: a tile in shared memory of int8, or of floats of 8 bits, in the order of
          `jdllm.quantised.out_of_order`.
        - `rows`: a tile in shared memory of bfloat16 or float16, whose inputs are in order.
        """
        ...

    @staticmethod
    def add_scaled_product(sums: Sums, weights: Any, scales: Any, rows: Any) -> Sums:
        """The same of weights of 4 bits, `jdllm.quantised.packed`, whose product is multiplied with `scales`,
        one for each column, in shared memory."""
        ...

    @staticmethod
    def add_product_of_scaled(sums: Sums, weights: Any, scales: Any, rows: Any) -> Sums:
        """The same, but weights are multiplied with `scales`, and rounded to the type of the rows, before the
        product."""
        ...

    @staticmethod
    def add_product_of_shifted(sums: Sums, weights: Any, halves: Sequence[Any], rows: Any) -> Sums:
        """The same of weights whose groups have offsets (`jdllm.quantised.Shifted`), which are added before
        weights are rounded.

        Arguments:
        - `halves`: of each 32 columns, bfloat16 in shared memory, `[2 * groups, 32]`: scales, then offsets.
        """
        ...

    @staticmethod
    def scaled(sums: Sums, scales: Any) -> Sums:
        """Sums times `scales`, one for each column, in memory."""
        ...


class TensorCores:
    """Products on the tensor cores (wgmma)."""

    @staticmethod
    def zeros(shape: tuple[int, int]) -> Sums:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    @staticmethod
    def add_product(sums: Sums, weights: Any, rows: Any) -> Sums:
        loaded = plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_2X)
        return TensorCores.accumulate(sums, widened(loaded, rows.dtype), rows.transpose((1, 0)))

    @staticmethod
    def add_scaled_product(sums: Sums, weights: Any, scales: Any, rows: Any) -> Sums:
        loaded = plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_2X)
        (number, depth), product = rows.shape, TensorCores.zeros((sums.shape[0], sums.shape[1]))
        parts = 1 if number <= _ROWS_AT_ONCE else 2

        def operands(part: int) -> tuple[Output, Any]:
            some = rows.at[:, pl.ds(part * depth // parts, depth // parts)]
            return widened_pairs(loaded, rows.dtype, part, parts), some.transpose((1, 0))

        for part in range(parts - 1):
            product = TensorCores.accumulate(product, *operands(part))
        last = operands(parts - 1)
        # Registers are fewest earlier. When the last product ends, all warps have read all of the stage.
        down = TensorCores._down(scales)
        product = TensorCores.accumulate(product, *last)
        return sums + TensorCores._across(down, sums.shape) * product

    @staticmethod
    def add_product_of_scaled(sums: Sums, weights: Any, scales: Any, rows: Any) -> Sums:
        loaded = plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_2X)
        wide = scaled_pairs(widened_pairs(loaded, rows.dtype, 0, 1), TensorCores._down(scales))
        return TensorCores.accumulate(sums, wide, rows.transpose((1, 0)))

    @staticmethod
    def add_product_of_shifted(sums: Sums, weights: Any, halves: Sequence[Any], rows: Any) -> Sums:
        loaded = plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_2X)
        wide = shifted_pairs(widened_pairs(loaded, rows.dtype, 0, 1), halves)
        return TensorCores.accumulate(sums, wide, rows.transpose((1, 0)))

    @staticmethod
    def scaled(sums: Sums, scales: Any) -> Sums:
        return sums * TensorCores._across(TensorCores._down(scales), sums.shape)

    @staticmethod
    def _down(scales: Any) -> Float[Array, " columns"]:
        """Scales in memory, as the columns of a product lie in registers."""
        return plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    @staticmethod
    def _across(down: Float[Array, " columns"], shape: tuple[int, ...]) -> Sums:
        """A number of each column for all rows."""
        return plgpu.layout_cast(lax.broadcast_in_dim(down, shape, [0]), plgpu.Layout.WGMMA)

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

    @staticmethod
    def widened(values: Any, scales: Any, dtype: jnp.dtype) -> Float[Array, "keys head_dim"]:
        layout = row_layout(values.shape[1])
        wide = widened_rows(plgpu.load(values, layout=layout), dtype)
        down = plgpu.load(scales, layout=layout.reduce(1), optimized=False).astype(dtype)
        return wide * plgpu.layout_cast(lax.broadcast_in_dim(down, wide.shape, [0]), layout)


class Interpreted:
    """The same for the interpreter, which has no products of operands in registers.

    Copies must not overtake its reads of shared memory, of which the tensor cores' are no example.
    """

    @staticmethod
    def zeros(shape: tuple[int, int]) -> Sums:
        return jnp.zeros(shape, jnp.float32)

    @staticmethod
    def add_product(sums: Sums, weights: Any, rows: Any) -> Sums:
        return sums + Interpreted._product(in_order(weights[...]), rows)

    @staticmethod
    def add_scaled_product(sums: Sums, weights: Any, scales: Any, rows: Any) -> Sums:
        return sums + scales[...][:, None] * Interpreted._product(unpacked(weights[...]), rows)

    @staticmethod
    def add_product_of_scaled(sums: Sums, weights: Any, scales: Any, rows: Any) -> Sums:
        wide = Interpreted.scaled(unpacked(weights[...]).astype(jnp.float32), scales)
        return sums + Interpreted._product(wide, rows)

    @staticmethod
    def add_product_of_shifted(sums: Sums, weights: Any, halves: Sequence[Any], rows: Any) -> Sums:
        down = jnp.concatenate([half[...].astype(jnp.float32) for half in halves], axis=1).T
        scales, offsets = jnp.split(jnp.repeat(down, SHIFTED_GROUP, axis=1), 2, axis=1)
        wide = unpacked(weights[...]).astype(jnp.float32) * scales + offsets
        return sums + Interpreted._product(wide, rows)

    @staticmethod
    def scaled(sums: Sums, scales: Any) -> Sums:
        return sums * scales[...][:, None]

    @staticmethod
    def _product(values: Array, rows: Any) -> Sums:
        contract = (((1,), (1,)), ((), ()))
        weights = values.astype(rows.dtype)
        product = lax.dot_general(weights, rows[...], contract, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return product

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

    @staticmethod
    def widened(values: Any, scales: Any, dtype: jnp.dtype) -> Float[Array, "keys head_dim"]:
        return values[...].astype(dtype) * scales[...].astype(dtype)[:, None]
