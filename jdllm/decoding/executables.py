"""Ahead-of-time compiled functions, one for each set of shapes and static arguments."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from jdllm.decoding.host_arguments import HostArguments, on_host

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


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A compiled function, called with arguments like those that it was compiled for.

    - `compiled`: takes the words of all merged leaves of the arguments, then the other leaves.
    - `tree`: of the arguments; `host`: which of its leaves are merged.
    """

    compiled: jax.stages.Compiled
    tree: Any
    host: HostArguments

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if tree != self.tree:
            raise TypeError(f"compiled for arguments {self.tree}, called with {tree}")
        words, others = self.host.merge(leaves)
        return self.compiled(words, *others)

    def memory_analysis(self) -> Any:
        """As of `jax.stages.Compiled`."""
        return self.compiled.memory_analysis()


def temp_bytes(executable: jax.stages.Compiled | Executable) -> int:
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
        self._compiled: dict[Hashable, Executable] = {}
        self._temp_bytes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def call(
        self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
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
    ) -> Executable:
        """The executable itself; `args` may be abstract (`jax.ShapeDtypeStruct`).

        Arguments:
        - `donate`: places of the arguments whose memory results may take.
        - `chained`: whether the function has chains of kernels (`jdllm.pallas.chain`).
        """
        kinds = tuple((leaf.shape, leaf.dtype, on_host(leaf)) for leaf in jax.tree.leaves(args))
        key = (function, donate, chained, kinds, tuple(sorted(static.items())))
        if key not in self._compiled:
            options = compiler_options(self.platform, chained=chained)
            self._compiled[key] = _build(functools.partial(function, **static), args, donate, options)
        return self._compiled[key]

    def temp_bytes(self, executable: Executable) -> int:
        """`temp_bytes` of one of these executables, which takes milliseconds, found out once."""
        if id(executable) not in self._temp_bytes:
            self._temp_bytes[id(executable)] = temp_bytes(executable)
        return self._temp_bytes[id(executable)]


def _build(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    donate: tuple[int, ...],
    options: dict[str, bool | int | str],
) -> Executable:
    leaves, tree = jax.tree.flatten(args)
    host = HostArguments.of(leaves)
    owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    passed = [owner for owner, part in zip(owners, host.parts, strict=True) if part is None]
    jitted = jax.jit(
        lambda words, *others: function(*jax.tree.unflatten(tree, host.split(words, others))),
        donate_argnums=tuple(1 + i for i, owner in enumerate(passed) if owner in donate),
        compiler_options=options,
    )
    words, others = host.merge(leaves)
    return Executable(jitted.lower(words, *others).compile(), tree, host)
