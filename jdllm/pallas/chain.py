"""Chains of kernels, each of which starts while the one before still runs (programmatic dependent launch).

A chained kernel says at once that the next one may start, and waits for the one before when it needs what
that wrote. Until then it may read only what was there before the chain began: weights, the pool, page tables.
A chain begins with a kernel that is not chained, which starts when all before it has ended. Kernels are
launched so from a stream only; in a graph of XLA's they wait for each other as always.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm.pallas.device import target


def let_next_start(chained: bool) -> None:
    """The first thing that a kernel does."""
    if chained and target().on_cuda:  # interpreted kernels run one after another
        plgpu.griddepcontrol_launch_dependents()


def wait_for_kernel_before(chained: bool) -> None:
    """Return when the kernel before has ended and what it wrote can be read; at once when called again."""
    if chained and target().on_cuda:
        plgpu.griddepcontrol_wait()
