"""The sums of products of a few rows: rings of stages in, columns of sums out."""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.products import Widening
from jdllm.pallas.skinny_matmul.launch import Launch, Scalar, Shared
from jdllm.pallas.skinny_matmul.tiles import product_columns

Sums = Float[Array, "product_columns rows"]


def multiply(shared: Shared, launch: Launch) -> list[Sums]:
    """The products of the rows with the block's columns of a weight, or of both, in f32.

    Returns sums of some columns after sums of others.
    """
    _, steps = launch.own_steps()
    product = product_columns(launch.summed)

    def accumulate(sums: Any) -> Sums:
        def issue(i: Scalar | int) -> None:
            stage = launch.stage(i)
            weights = shared.weights.at[pl.ds(stage * launch.stage_columns, product)]
            x = shared.x.at[pl.ds(stage * launch.rows, launch.rows)]
            plgpu.barrier_wait(shared.full.at[stage])
            plgpu.wgmma(sums, weights, x.transpose((1, 0)))

        def release(i: Scalar) -> None:
            plgpu.barrier_arrive(shared.free.at[launch.stage(i)])

        def step(i: Scalar, _: None) -> None:
            issue(i)
            plgpu.wgmma_wait(1)  # of the steps, only this one is still under way
            release(i - 1)

        # Products are issued before those of the step before have ended; a stage is free a step later. Where
        # a product takes more columns than a stage has, nobody reads the sums of the others.
        issue(0)
        lax.fori_loop(1, steps, step, None)
        whole = sums[...]
        release(steps - 1)
        return whole

    return [pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((product, launch.rows)))]


def multiply_quantised(shared: Shared, launch: Launch, products: Widening) -> list[Sums]:
    """`multiply` for weights of 8 bits, 64 columns after 64 columns; nothing is scaled.

    Weights are widened in registers, from where a product takes them: 64 columns are as many as there is room
    for beside the sums.
    """
    _, steps = launch.own_steps()
    begins = range(0, product_columns(launch.summed), WARPGROUP_ROWS)

    def step(i: Scalar, sums: tuple[Sums, ...]) -> tuple[Sums, ...]:
        stage = launch.stage(i)
        x = shared.x.at[pl.ds(stage * launch.rows, launch.rows)]
        plgpu.barrier_wait(shared.full.at[stage])
        added = []
        for begin, before in zip(begins, sums, strict=True):
            weights = shared.weights.at[pl.ds(stage * launch.stage_columns + begin, WARPGROUP_ROWS)]
            added.append(products.add_product(before, products.widened(weights, x.dtype), x))
        plgpu.barrier_arrive(shared.free.at[stage])
        return tuple(added)

    zeros = products.zeros((WARPGROUP_ROWS, launch.rows))
    return list(lax.fori_loop(0, steps, step, (zeros,) * len(begins)))
