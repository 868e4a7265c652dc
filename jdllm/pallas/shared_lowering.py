"""Kernels that are lowered once in a process, whichever executables they are part of.

A kernel's body is traced and lowered in Python, which takes longer than the rest of a step. Executables of a
ladder have most of their kernels in common.
"""

import collections
import functools
import inspect
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import export

from jdllm.pallas.device import target

CAPACITY = 512
"""Lowered kernels that are kept: those of two ladders; those go first that were used least recently."""

_UNCHECKED = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]  # other versions of JAX never see it


class LoweredKernels:
    """Lowered kernels by all that they depend on; several threads may share it.

    Arguments:
    - `capacity`: how many are kept.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._kept: collections.OrderedDict[Hashable, Callable[..., Any]] = collections.OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, lower: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """What is kept under `key`, or else what `lower` returns."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = lower()
            self._kept.move_to_end(key)
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
            return self._kept[key]


kernels = LoweredKernels(CAPACITY)


def lowered_once[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose kernel is to be lowered once for shapes, types, static arguments and device.

    Where kernels are interpreted, the function is called as it is.

    Arguments:
    - `static`: names of its arguments that are hashable and no arrays, nor trees of arrays.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not target().on_cuda:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            fixed = {name: bound.arguments.pop(name) for name in static}
            leaves, tree = jax.tree.flatten(dict(bound.arguments))
            kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            key = function, tree, kinds, tuple(fixed.values()), target(), jax.config.jax_enable_x64

            def lower() -> Callable[..., Any]:
                def kernel(*leaves: Any) -> R:
                    call: Callable[..., R] = function
                    return call(**jax.tree.unflatten(tree, leaves), **fixed)

                kernel.__name__ = function.__name__
                shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
                exported = export.export(jax.jit(kernel), platforms=["cuda"], disabled_checks=_UNCHECKED)
                return jax.jit(exported(*shapes).call)

            return kernels.get(key, lower)(*leaves)

        return call

    return decorate
