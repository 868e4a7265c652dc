"""Chains of kernels, each of which starts while the one before still runs (programmatic dependent launch).

A chained kernel says at once that the next one may start, and waits for the one before when it needs what
that wrote. Until then it may read only what was there before the chain began: weights, the pool, page tables.
A chain begins with a kernel that is not chained, which starts when all before it has ended. Kernels are
launched so from a stream only; in a graph of XLA's they wait for each other as always.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm.pallas.device import target
from jdllm.pallas.hopper import SHARED_BYTES

ALONE = plgpu.SMEM((SHARED_BYTES // 2 + 4096,), jnp.int8)
"""Memory that a block of a row leaves unused. With more than half of the shared memory each block has a
processor for itself. Blocks that start early find room on few processors only, those that the kernel before
leaves idle, and would crowd there."""


def let_next_start(chained: bool) -> None:
    """The first thing that a kernel does."""
    if chained and target().on_cuda:  # interpreted kernels run one after another
        plgpu.griddepcontrol_launch_dependents()


def wait_for_kernel_before(chained: bool) -> None:
    """Return when the kernel before has ended and what it wrote can be read; at once when called again."""
    if chained and target().on_cuda:
        plgpu.griddepcontrol_wait()
