"""Compile for a GPU without one.

XLA can compile for a card that is only described (`targets/*.textproto`): kernels, schedules and memory
are those of the card, except for choices that need a run on it (autotuning, cuDNN workspaces). Needs the
`cuda13` or the `cuda12` extra, and no driver.
"""

import functools
import importlib.util
import re
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from jdllm.compiling.executable import donated_places
from jdllm.compiling.executables import compiler_options
from jdllm.compiling.over_cards import bound, mesh_of
from jdllm.models.weights import HOST_LAYERS
from jdllm.pallas.device import Target, known_kernels
from jdllm.planning.descriptions import description


def capability_of(target: str) -> tuple[int, int]:
    """The compute capability of a described card such as "h200", (9, 0) for Hopper."""
    stated = re.search(r"cuda_compute_capability\s*{([^}]*)}", description(target))
    numbers = dict(re.findall(r"(major|minor):\s*(\d+)", stated[1] if stated else ""))
    return int(numbers.get("major", 0)), int(numbers.get("minor", 0))


def memory_of(target: str) -> int:
    """Bytes of memory of a described card such as "h200"."""
    stated = re.search(r"device_memory_size:\s*(\d+)", description(target))
    return int(stated[1]) if stated else 0


def device_of(target: str, kernels: str = "auto") -> Target:
    """What operators choose their forms by on a described card, for which any kernel can be compiled.

    Arguments:
    - `target`: the name of the card, such as "h200".
    - `kernels`: "auto" for any kernel that suits the card, "triton" for kernels in Triton, "xla" for none.
    """
    major, minor = capability_of(target)
    return Target(on_cuda=True, capability=major + minor / 10, kernels=known_kernels(kernels))


def has_compiler() -> bool:
    """Whether a compiler for CUDA is installed, by the extra `cuda13` or `cuda12`."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


@functools.cache
def target_devices(target: str, cards: int = 1) -> tuple[Any, ...]:
    """Described cards of one host.

    Arguments:
    - `target`: a name for which `targets/` holds a description, such as "h200" or "rtx4090".

    Raises `ConfigError` for any other name.
    """
    described = description(target)
    found = topologies.get_topology_desc(platform="cuda", target_config=described, topology=f"1x1x{cards}")
    return tuple(found.devices)


def target_sharding(target: str) -> NamedSharding:
    """The placement of arrays on one described card; raises as `target_devices` does."""
    return NamedSharding(Mesh(np.array(target_devices(target)), ("device",)), PartitionSpec())


def compile_for(
    target: str,
    function: Callable[..., Any],
    *args: Any,
    donate: tuple[str, ...] = (),
    chained: bool = False,
    concurrent: bool = False,
    **static: Hashable,
) -> jax.stages.Compiled:
    """Compile `function(*args, **static)` for a described card.

    Arguments:
    - `target`: as `target_sharding` takes it.
    - `args`: trees of anything with a shape and a dtype, such as `jax.ShapeDtypeStruct`. Where some have
      shardings on several described cards, all of these run the function (`jdllm.compiling.over_cards`).
      Below a key `HOST_LAYERS` arrays are in host memory.
    - `donate`: names of the arguments whose memory results may take.
    - `chained`: whether the function has chains of kernels.
    - `concurrent`: whether kernels run side by side where they can.
    - `static`: keyword arguments that are no arrays.

    Returns the executable, whose `memory_analysis()` and `as_text()` answer for the card. It cannot run.
    """
    cards = mesh_of(args)
    everywhere = target_sharding(target) if cards is None else NamedSharding(cards, PartitionSpec())

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        own = None if cards is None else getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own or everywhere)

    args = jax.tree.map(placed, args)
    options = compiler_options("cuda", chained=chained, concurrent=concurrent)
    donated = donated_places(function, donate)
    called = bound(function, args, static, donated, cards)
    jitted = jax.jit(lambda *a: called(*_offloaded(a)), donate_argnums=donated, compiler_options=options)
    with jax.default_device(target_devices(target)[0]):
        return jitted.lower(*args).compile()


def _offloaded(args: Any) -> Any:
    """Arguments of which some go to host memory first: JAX cannot say of a described card that they are there
    from the beginning."""

    def put(path: tuple[Any, ...], x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Host) if DictKey(HOST_LAYERS) in path else x

    return jax.tree.map_with_path(put, args)
