"""Pinned host memory: moving arrays there and back, side by side with computation."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

Device = Any
"""A `jax.Device`, which has no static type."""

IN_FLIGHT = 3
"""Chunks that are on the device at a time: one arrives, one is computed, one leaves."""


def to_device(tree: Any, device: Device) -> Any:
    """Copy arrays into the memory of `device`; those that are there already stay."""
    return jax.device_put(tree, SingleDeviceSharding(device))


def to_host(tree: Any, device: Device) -> Any:
    """Copy arrays into pinned host memory, which `device` reads and writes at full speed.

    On GPUs the runtime has 64 GB of it, unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise.
    """
    return jax.device_put(tree, SingleDeviceSharding(device, memory_kind="pinned_host"))


def pipeline[Item, Fetched](
    items: Sequence[Item], fetch: Callable[[Item], Fetched], work: Callable[[Item, Fetched], Any]
) -> None:
    """`work(item, fetch(item))` for all items in order, with transfers and computation side by side.

    Arguments:
    - `items`: at least one.
    - `fetch`: enqueues the transfers of an item to the device. It is called before the work of the item in
      front is enqueued: XLA's GPU runtime starts a transfer after all computation that was enqueued before
      it, because the memory that it writes to may still be in use there.
    - `work`: enqueues the computation of an item, and returns an array that exists when the item is done. An
      item is fetched when all but the `IN_FLIGHT - 1` before it are done, for a transfer takes its memory
      when it is enqueued.

    Everything is done when it returns.
    """
    pending: deque[Any] = deque()
    ahead = deque([fetch(items[0])])
    for i, item in enumerate(items):
        if len(pending) == IN_FLIGHT - 1:
            jax.block_until_ready(pending.popleft())
        if i + 1 < len(items):
            ahead.append(fetch(items[i + 1]))
        pending.append(work(item, ahead.popleft()))
    jax.block_until_ready(list(pending))
