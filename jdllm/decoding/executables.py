"""Ahead-of-time compiled functions, one for each set of shapes and static arguments."""

from collections.abc import Callable, Hashable
from typing import Any

import jax

_IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,DYNAMIC_SLICE_FUSION"  # but no CUSTOM_CALL


def compiler_options(platform: str, *, chained: bool = False) -> dict[str, bool | int | str]:
    """Options of an executable, by platform and by whether it has chains of kernels (`jdllm.pallas.chain`).

    Triton matrix products cannot read a slice of stacked weights in place: with them, each layer of a scan
    copies its weights first. The dot merger concatenates the weights of products that share an operand, which
    is a copy of them in every layer too. Kernels of a chain are launched one by one: in a graph, none would
    start before the one before it has ended.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    options: dict[str, bool | int | str] = {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
    }
    return options | ({"xla_gpu_enable_command_buffer": _IN_GRAPHS} if chained else {})


def temp_bytes(executable: jax.stages.Compiled) -> int:
    """Device bytes that an executable needs beside its arguments and results."""
    memory = executable.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes


class Executables:
    """Compiles on first use and keeps what it compiled.

    Arguments:
    - `platform`: the platform of the arrays that will be passed, for the compiler options.
    """

    def __init__(self, platform: str):
        self.platform = platform
        self._compiled: dict[Hashable, Any] = {}
        self._temp_bytes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def call(
        self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Hashable
    ) -> Any:
        """`function(*args, **static)` by the executable for the shapes of `args` and for `static`.

        The arguments at the places `donate` give their memory to results, and cannot be used again.
        """
        return self.compile(function, *args, donate=donate, **static)(*args)

    def compile(
        self,
        function: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        chained: bool = False,
        **static: Hashable,
    ) -> Any:
        """The executable itself; `args` may be abstract (`jax.ShapeDtypeStruct`).

        `chained` says that the function has chains of kernels (`jdllm.pallas.chain`).
        """
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args))
        key = (function, donate, chained, shapes, tuple(sorted(static.items())))
        if key not in self._compiled:
            options = compiler_options(self.platform, chained=chained)
            jitted = jax.jit(
                lambda *a: function(*a, **static), donate_argnums=donate, compiler_options=options
            )
            self._compiled[key] = jitted.lower(*args).compile()
        return self._compiled[key]

    def temp_bytes(self, executable: jax.stages.Compiled) -> int:
        """`temp_bytes` of one of these executables, which takes milliseconds, found out once."""
        if id(executable) not in self._temp_bytes:
            self._temp_bytes[id(executable)] = temp_bytes(executable)
        return self._temp_bytes[id(executable)]
