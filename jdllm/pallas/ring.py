"""Rings of stages in shared memory, through which one warpgroup of a block passes operands to the others."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jdllm.pallas.hopper import STRIP, SWIZZLE

COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
"""The default semantics infer layouts, which takes 20 s for the operations of the head's kernel."""


def swizzled(shape: tuple[int, ...], dtype: jnp.dtype, strip: int = STRIP) -> Any:
    """Shared memory for an operand of the tensor cores, of 16 bits or of fewer that become 16.

    Arguments:
    - `strip`: 1 where rows are copied one by one.
    """
    width = min(SWIZZLE, shape[-1] * jnp.dtype(dtype).itemsize)
    layout = (
        plgpu.TilingTransform((strip, width // jnp.dtype(dtype).itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(width),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype=dtype, transforms=layout)


def free_barriers(stages: int, arrivals: int, cluster: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    """Barriers that say when a stage is free: when all blocks that its copies may reach are done with it.

    Arguments:
    - `arrivals`: warpgroups of a block that read a stage.
    - `cluster`, `axes`: the shape of a cluster and the names of its axes.
    """
    if all(size == 1 for size in cluster):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    return plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=arrivals, num_barriers=stages)


def drain(steps: Int[Array, ""], stages: int, *free: Any) -> None:
    """Wait until all stages are free: a block must not end while another one may still signal it.

    Arguments:
    - `steps`: how many the loader has filled, which waited for each that it filled again.
    - `free`: barriers of one ring or of several that went through the same steps.
    """

    def wait(step: Int[Array, ""], _: None) -> None:
        for barriers in free:
            plgpu.barrier_wait(barriers.at[lax.rem(step, jnp.int32(stages))])

    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, wait, None)


def in_roles(
    consumers: int,
    registers: Sequence[int] | None,
    load: Callable[[], None],
    consume: Callable[[], None],
    *others: Callable[[], None],
) -> None:
    """Let the first warpgroups of a block call `consume`, the next one `load`, and each further one the next
    of `others`.

    Arguments:
    - `consumers`: how many consume.
    - `registers`: of a thread that loads, of one that consumes, and of one of each of the others, which like
      the first gives some of its own away; `None` leaves them as they are.
    """
    warpgroup = lax.axis_index("warpgroup")

    def start(role: Callable[[], None], number: int) -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[number], action="increase" if role is consume else "decrease")
        role()

    pl.when(warpgroup == consumers)(lambda: start(load, 0))
    pl.when(warpgroup < consumers)(lambda: start(consume, 1))
    for number, role in enumerate(others, 1):
        pl.when(warpgroup == consumers + number)(functools.partial(start, role, number + 1))


def pass_on(full: Any, free: Any) -> None:
    """Wait for a stage that this warpgroup does not read, and say that the stage is free.

    One warp speaks for all four, so the others must have seen the full stage before. A barrier tells only
    odd fillings from even ones: a warp that is a filling late waits for ever.

    Arguments:
    - `full`, `free`: the barriers of the stage.
    """
    plgpu.barrier_wait(full)
    release(free)


def release(free: Any) -> None:
    """Say that this warpgroup is done with a stage, when all of its warps are.

    Behind a product of the tensor cores `plgpu.barrier_arrive` is enough: all warps begin a product together.

    Arguments:
    - `free`: the barrier of the stage.
    """
    plgpu.commit_smem()  # it waits for all warps
    plgpu.barrier_arrive(free)
