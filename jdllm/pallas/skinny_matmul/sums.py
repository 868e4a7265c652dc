"""The sums of products of a few rows: rings of stages in, columns of sums out."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.products import Widening
from jdllm.pallas.ring import release
from jdllm.pallas.skinny_matmul.launch import Launch, Scalar, Shared

Sums = Float[Array, "product_columns rows"]


def multiply(shared: Shared, launch: Launch) -> Sums:
    """The products of the rows with the block's columns of a weight, or of both, in f32."""
    _, steps = launch.own_steps()

    def accumulate(sums: Any) -> Sums:
        def issue(i: Scalar | int) -> None:
            stage = launch.stage(i)
            weights = shared.weights.at[pl.ds(stage * launch.stage_columns, launch.product)]
            x = shared.x.at[pl.ds(stage * launch.rows, launch.rows)]
            plgpu.barrier_wait(shared.full.at[stage])
            plgpu.wgmma(sums, weights, x.transpose((1, 0)))

        def free(i: Scalar) -> None:
            plgpu.barrier_arrive(shared.free.at[launch.stage(i)])

        def step(i: Scalar, _: None) -> None:
            issue(i)
            plgpu.wgmma_wait(1)  # of the steps, only this one is still under way
            free(i - 1)

        # Products are issued before those of the step before have ended; a stage is free a step later. Where
        # a product takes more columns than a stage has, nobody reads the sums of the others.
        issue(0)
        lax.fori_loop(1, steps, step, None)
        whole = sums[...]
        free(steps - 1)
        return whole

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((launch.product, launch.rows)))


def multiply_quantised(shared: Shared, launch: Launch, products: Widening) -> None:
    """Leave the sums of quantised weights in shared memory, those of rows with one scale not scaled.

    Weights are widened in registers, from where a product takes them. Each warpgroup takes 64 columns, of one
    in `turns` steps. The sums of one turn are below those of another, and all warpgroups see all of them.
    """
    _, steps = launch.own_steps()
    mine, turns = lax.axis_index("warpgroup"), jnp.int32(launch.tiles.turns)
    turn, first = lax.rem(mine, turns), lax.div(mine, turns) * WARPGROUP_ROWS

    def step(k: Scalar, sums: Sums) -> Sums:
        stage = launch.stage(turn + k * turns)
        x = shared.x.at[pl.ds(stage * launch.rows, launch.rows)]
        columns = pl.ds(stage * launch.stage_columns + first, WARPGROUP_ROWS)
        plgpu.barrier_wait(shared.full.at[stage])
        weights = shared.weights.at[columns]
        if launch.tiles.shifted:
            sums = products.add_product_of_shifted(sums, weights, launch.halves(shared, stage, first), x)
        elif launch.tiles.grouped:
            sums = products.add_scaled_product(sums, weights, shared.scales.at[columns], x)
        else:
            sums = products.add_product(sums, weights, x)
        plgpu.barrier_arrive(shared.free.at[stage])
        return sums

    own = lax.div(steps - turn + turns - 1, turns)
    sums = lax.fori_loop(0, own, step, products.zeros((WARPGROUP_ROWS, launch.rows)))
    _meet(shared.together.at[0])  # all stages are read: sums take their place
    shared.sums[pl.ds(turn * launch.product + first, WARPGROUP_ROWS), : launch.rows] = sums
    _meet(shared.together.at[1])


def _meet(barrier: Any) -> None:
    """Wait for all warpgroups that multiply."""
    release(barrier)
    plgpu.barrier_wait(barrier)
