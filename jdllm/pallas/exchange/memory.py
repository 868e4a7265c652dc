"""The memory that cards of one process have for exchanges, and what each has to know of the others'."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from jdllm.pallas.exchange.layout import MAX_CARDS, address_words, memory_bytes

_HOPPER = "9.0"

# What XLA lets other cards reach: memory of `cuMemAlloc`, which these allocators of its take.
_REACHABLE = ("default", "bfc", "platform")

_memories: dict[tuple[Any, ...], Array] = {}  # never freed: kernels that run know the addresses
_making = threading.Lock()


def addresses_of(mesh: Mesh) -> Int32[Array, "cards words"] | None:
    """What an exchange takes besides a part, spread over the cards: `None` where they cannot exchange.

    The memory behind it is made on the first call for these cards, and stays.

    Arguments:
    - `mesh`: the cards, along one axis.
    """
    devices = tuple(mesh.devices.flat)
    if not can_exchange(devices, peers_of_driver):
        return None
    with _making:
        if devices not in _memories:
            _memories[devices] = _new_memory(mesh)
    at = {shard.device: shard.data.unsafe_buffer_pointer() for shard in _memories[devices].addressable_shards}
    table = address_table([at[device] for device in devices])
    return jax.device_put(table, NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


def described_addresses(mesh: Mesh) -> jax.ShapeDtypeStruct | None:
    """The shape of `addresses_of` for cards that are only described: `None` where the kernel does not suit
    them."""
    devices = list(mesh.devices.flat)
    if not _suit(devices):
        return None
    shape = (len(devices), address_words(len(devices)))
    return jax.ShapeDtypeStruct(
        shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    )


def can_exchange(devices: Sequence[Any], reaches: Callable[[int, int], bool]) -> bool:
    """Whether kernels on these devices can write into each other's memory.

    Arguments:
    - `devices`: of `jax.Device`, which has no static type.
    - `reaches`: whether the first of two cards, by their numbers in this process, can write into the memory
      of the second.
    """
    if not _suit(devices) or any(device.process_index != jax.process_index() for device in devices):
        return False
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() not in _REACHABLE:
        return False
    numbers = [device.local_hardware_id for device in devices]
    return all(reaches(a, b) for a in numbers for b in numbers if a != b)


def address_table(addresses: Sequence[int]) -> Int32[np.ndarray, "cards words"]:
    """A row for each card, in words of 64 bits cut in two: its number, its own address, and those of the
    cards behind it, in a ring.

    Arguments:
    - `addresses`: of the memory of each card.
    """
    cards = len(addresses)
    rows = [[card, *(addresses[(card + i) % cards] for i in range(cards))] for card in range(cards)]
    return np.array(rows, np.uint64).view(np.int32)


@functools.cache
def peers_of_driver(card: int, peer: int) -> bool:
    """Whether NVIDIA's driver lets a card write into the memory of another; `False` without a driver.

    Arguments:
    - `card`, `peer`: numbers of cards in this process.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    found = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceCanAccessPeer(ctypes.byref(found), card, peer)
    return not failed and found.value == 1


def _suit(devices: Sequence[Any]) -> bool:
    """Whether the kernel runs on such devices, so many."""
    return 1 < len(devices) <= MAX_CARDS and all(
        device.platform in ("gpu", "cuda") and getattr(device, "compute_capability", None) == _HOPPER
        for device in devices
    )


def _new_memory(mesh: Mesh) -> Array:
    """Zeros on each card: no flag is raised, and no sum is counted."""
    cards = mesh.devices.size
    at = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    make = jax.jit(lambda: jnp.zeros((cards, memory_bytes(cards) // 4), jnp.int32), out_shardings=at)
    return jax.block_until_ready(make())
