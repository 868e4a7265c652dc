"""One ahead-of-time compiled function: how it is lowered, compiled, called, and written as bytes."""

import dataclasses
import functools
import inspect
import io
import pickle
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jdllm.compiling.host_arguments import HostArguments
from jdllm.compiling.over_cards import bound, mesh_of, placements, whole_on_each
from jdllm.pallas.device import find_kernel_runtime

_IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,DYNAMIC_SLICE_FUSION"  # but no CUSTOM_CALL

Options = dict[str, bool | int | str]

Device = Any
"""A `jax.Device`, which has no static type."""


def compiler_options(
    platform: str, *, chained: bool = False, tuned: bool = True, concurrent: bool = False
) -> Options:
    """Options of an executable.

    Arguments:
    - `platform`: such as "cuda".
    - `chained`: whether the function has chains of kernels (`jdllm.pallas.chain`).
    - `tuned`: whether its matrix products are tried on the device while it is compiled.
    - `concurrent`: whether kernels of a graph that need nothing of one another run side by side. Fewer
      temporaries then take the memory of others.

    Triton matrix products cannot read a slice of stacked weights in place: with them, each layer of a scan
    copies its weights first. The dot merger concatenates the weights of products that share an operand, which
    is a copy of them in every layer too. XLA counts a pool that is written in place once for each write.
    Where the pool fills the card, XLA would compute products twice, to save memory that the plan does not
    lack. Kernels of a chain are launched one by one: in a graph, none would start before the one before it
    has ended. On several cards a scheduler of XLA's hides transfers: it would put other kernels between those
    of a chain.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    options: Options = {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_disable_hlo_passes": "rematerialization",
    }
    if chained:
        options["xla_gpu_enable_command_buffer"] = _IN_GRAPHS
        options["xla_gpu_enable_latency_hiding_scheduler"] = False
    if not tuned:
        options["xla_gpu_autotune_level"] = 0
    if concurrent:
        options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
    return options


class Program(NamedTuple):
    """What an executable is compiled from.

    - `function`: called as `function(*args, **static)`.
    - `args`: trees of NumPy arrays, of JAX arrays, or of `jax.ShapeDtypeStruct` for arrays on the device.
    - `static`: keyword arguments that are no arrays.
    - `donate`: names of the function's arguments whose memory results may take.
    - `chained`: whether the function has chains of kernels (`jdllm.pallas.chain`).
    - `tuned`: whether its matrix products are tried on the device while it is compiled, on copies of their
      operands.
    - `name`: what messages call it.
    - `concurrent`: whether its kernels run side by side where they can, for which it needs more memory.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    static: Mapping[str, Hashable]
    donate: tuple[str, ...] = ()
    chained: bool = False
    tuned: bool = True
    name: str = ""
    concurrent: bool = False


class Flat(NamedTuple):
    """A program as a function of arrays.

    - `run`: takes the words of all merged leaves of the arguments, then the other leaves; returns the leaves
      of the results.
    - `donated`: places of the donated ones among what `run` takes.
    - `args`: its arguments.
    - `tree`, `host`: of the program's arguments, and which leaves are merged.
    - `mesh`: the cards that run it, `None` for one.
    """

    run: Callable[..., list[Any]]
    donated: tuple[int, ...]
    args: tuple[Any, ...]
    tree: Any
    host: HostArguments
    mesh: Mesh | None

    @classmethod
    def of(cls, program: Program, results: list[Any]) -> "Flat":
        """Tracing `run` appends the tree of the results to `results`."""
        leaves, tree = jax.tree.flatten(program.args)
        host = HostArguments.of(leaves)
        owners = [i for i, arg in enumerate(program.args) for _ in jax.tree.leaves(arg)]
        passed = [owner for owner, part in zip(owners, host.parts, strict=True) if part is None]
        places = donated_places(program.function, program.donate)
        donated = tuple(1 + i for i, owner in enumerate(passed) if owner in places)
        mesh = mesh_of(program.args)
        function = bound(program.function, program.args, program.static, places, mesh)

        def run(words: Any, *others: Any) -> list[Any]:
            out, out_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, host.split(words, others))))
            results.append(out_tree)
            return out

        run.__name__ = module_name(program.name)
        words, others = host.merge(leaves)
        return cls(run, donated, (words, *others), tree, host, mesh)


def module_name(name: str) -> str:
    """What profilers call an executable whose program has a name, apart from what JAX puts before it."""
    return re.sub(r"\W+", "_", name) or "run"


def donated_places(function: Callable[..., Any], donate: Sequence[str]) -> tuple[int, ...]:
    """The places of the arguments with these names among the arguments of `function`."""
    names = list(inspect.signature(function).parameters) if donate else []
    return tuple(names.index(name) for name in donate)


class DeviceBytes(NamedTuple):
    """Device bytes that an executable needs beside its arguments.

    - `temporaries`: while it runs.
    - `results`: of those that do not take the memory of donated arguments.
    """

    temporaries: int
    results: int


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A compiled function, called with arguments like those that it was compiled for.

    - `compiled`: of `Flat.run`.
    - `tree`, `out_tree`: the structure of the arguments and of the results.
    - `host`: how the leaves that the host passes are merged into words.
    - `needs`: kept, because XLA takes tens of milliseconds to count the bytes.
    - `sent`: the words that a call takes in place of its own, `None` for its own.
    """

    compiled: jax.stages.Compiled
    tree: Any
    host: HostArguments
    out_tree: Any
    needs: DeviceBytes
    sent: Int[Array, " words"] | None = None

    def sending(self, *args: Any) -> "Executable":
        """The same, with the numbers of the host on their way to the device: its calls pass these numbers.

        A call then has little left to do before the device begins. Cards of several processes get the numbers
        with the call: sent before, they would be compared between the processes.

        Arguments:
        - `args`: as those of a call. Arrays on the device may be abstract, but for one at least.
        """
        words, others = self.host.merge(self._leaves(args))
        arrays = [leaf for leaf in others if isinstance(leaf, jax.Array)]
        whole = whole_on_each(arrays)
        if whole is not None and whole.mesh.is_multi_process:
            return self
        place = next(iter(arrays[0].devices())) if whole is None else whole
        return dataclasses.replace(self, sent=jax.device_put(words, place))

    def __call__(self, *args: Any) -> Any:
        leaves = self._leaves(args)
        if self.sent is None:
            words, others = self.host.merge(leaves)
        else:
            words, others = self.sent, self.host.others(leaves)
        return jax.tree.unflatten(self.out_tree, self.compiled(words, *others))

    def _leaves(self, args: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(args)
        if tree != self.tree:
            raise TypeError(f"compiled for arguments {self.tree}, called with {tree}")
        return leaves


def device_bytes(compiled: jax.stages.Compiled) -> DeviceBytes:
    """What an executable needs, none of both where its backend does not tell."""
    memory = compiled.memory_analysis()
    if memory is None:
        return DeviceBytes(0, 0)
    return DeviceBytes(memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes)


def temp_bytes(executable: jax.stages.Compiled | Executable) -> int:
    """Device bytes that an executable needs beside its arguments and results."""
    needs = executable.needs if isinstance(executable, Executable) else device_bytes(executable)
    return needs.temporaries


class Lowered(NamedTuple):
    """A program that only the backend has to compile; `out_tree` is of its results."""

    stage: jax.stages.Lowered
    out_tree: Any


def lower(program: Program, options: Options) -> Lowered:
    """Trace and lower a program with the options of the compiler."""
    results: list[Any] = []
    flat = Flat.of(program, results)
    jit = functools.partial(jax.jit, donate_argnums=flat.donated, compiler_options=options)
    if flat.mesh is not None:
        jit = functools.partial(jit, in_shardings=placements(flat.args, flat.mesh))
    jitted = jit(flat.run)
    stage = jitted.lower(*flat.args)
    return Lowered(stage, results[-1])


def finish(program: Program, lowered: Lowered) -> Executable:
    """Have the backend compile what `lower` returned."""
    leaves, tree = jax.tree.flatten(program.args)
    compiled = lowered.stage.compile()
    return Executable(compiled, tree, HostArguments.of(leaves), lowered.out_tree, device_bytes(compiled))


class _Pickler(serialize_executable._JaxPjrtPickler):
    """As JAX's own, but that the executable is serialised as JAX's compilation cache does it: the other way
    refuses sorts on a CPU."""

    def __init__(self, file: Any, runtime: Any):
        super().__init__(file)
        self._runtime = runtime

    def persistent_id(self, obj: Any) -> Any:
        return ("exec", obj.serialize()) if obj is self._runtime else super().persistent_id(obj)


def to_bytes(executable: Executable) -> bytes | None:
    """An executable as `from_bytes` takes it; `None` where its constants or its backend do not allow that."""
    compiled: Any = executable.compiled
    if compiled._params.const_args:
        return None
    described = compiled._executable._unloaded_executable, jax.tree.leaves(compiled.args_info), True
    file = io.BytesIO()
    try:
        _Pickler(file, compiled.runtime_executable()).dump(described)
    except jax.errors.JaxRuntimeError:
        return None
    trees = jax.tree.structure(compiled.args_info), compiled.out_tree, executable.out_tree
    return pickle.dumps((file.getvalue(), *trees, tuple(executable.needs)))


def from_bytes(content: bytes, program: Program, devices: Sequence[Device]) -> Executable:
    """The executable of `program` that was compiled for these devices, or for others like them.

    Runs code that `content` names: it has to be this user's own. Raises what unpickling raises, or XLA, where
    it is not as `to_bytes` made it.
    """
    if devices[0].platform == "gpu":
        find_kernel_runtime()
    serialised, in_tree, flat_tree, out_tree, needs = pickle.loads(content)
    compiled = serialize_executable.deserialize_and_load(
        serialised, in_tree, flat_tree, devices[0].client, devices
    )
    leaves, tree = jax.tree.flatten(program.args)
    return Executable(compiled, tree, HostArguments.of(leaves), out_tree, DeviceBytes(*needs))
