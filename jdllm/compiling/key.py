"""What an executable depends on, as a text that is the same in every process."""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import platform
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jdllm
from jdllm.compiling.executable import Device, Options, Program
from jdllm.compiling.host_arguments import on_host
from jdllm.compiling.over_cards import spec_of
from jdllm.pallas.device import Kernels

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "tokamax", "jax-triton", "triton")
_TRACING = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
)
_VARIABLES = ("XLA_FLAGS", "MOSAIC_GPU_DUMP_TO")


class NotDescribedError(Exception):
    """A value that may mean something else in another process."""


def program_key(
    program: Program, options: Options, kernels: Kernels, devices: tuple[Device, ...]
) -> str | None:
    """Everything that the executable of a program depends on, with the options of the compiler among it.

    `None` where that cannot be told: for functions that are not of this package, and for values of unknown
    types.

    Arguments:
    - `devices`: that run it, in order.
    """
    leaves, tree = jax.tree.flatten(program.args)
    kinds = [
        (leaf.shape, str(leaf.dtype), on_host(leaf), memory_kind_of(leaf), str(spec_of(leaf)))
        for leaf in leaves
    ]
    try:
        parts = [
            described(program.function),
            described(dict(program.static)),
            str(tree),
            described(tuple(_held(tree))),
            repr(kinds),
            repr((program.donate, sorted(options.items()), kernels)),
        ]
    except NotDescribedError:
        return None
    return "\n".join([*parts, *map(environment, devices)])


def _held(tree: Any) -> Iterator[Any]:
    """What nodes of classes of this package hold beside arrays, such as the rules of a batch."""
    node = tree.node_data()
    if node is not None and hasattr(node[0], "tree_flatten"):
        yield node[1]
    for part in tree.children():
        yield from _held(part)


def described(value: Any) -> str:
    """A text that tells a value from all others, in any process.

    Raises `NotDescribedError` for values that are no plain ones, no declarations and no functions of jdllm.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{kind}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str | bytes | np.dtype):
        return f"{kind}({value!r})"
    if isinstance(value, np.generic):
        return f"{kind}({value.item()!r})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{kind}({described(fields)})"
    if isinstance(value, tuple):
        return f"{kind}({', '.join(map(described, value))})"
    if isinstance(value, frozenset):
        return f"{kind}({', '.join(sorted(map(described, value)))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{described(k)}: {described(v)}' for k, v in value.items()))}}}"
    if isinstance(value, functools.partial):
        return f"partial({described((value.func, *value.args))}, {described(value.keywords)})"
    return _function(value)


def _function(value: Any) -> str:
    """A function whose source is part of `sources`, with the values that it closes over."""
    own = isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] == jdllm.__name__
    if not own:
        raise NotDescribedError(value)
    inside = tuple(cell.cell_contents for cell in value.__closure__ or ()), value.__defaults__
    place = value.__module__, value.__qualname__, value.__code__.co_firstlineno
    return f"function({place}, {described(inside)}, {described(value.__kwdefaults__)})"


def memory_kind_of(leaf: Any) -> str | None:
    """The kind of memory that holds an array, unless it is the device's own."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.memory_kind is None:
        return None
    default = next(iter(sharding.device_set)).default_memory().kind
    return None if sharding.memory_kind == default else sharding.memory_kind


@functools.cache
def environment(device: Device) -> str:
    """Versions, sources, the device, and the processor, whose instructions are in executables too."""
    values = [
        *(f"{name} {version_of(name)}" for name in _PACKAGES),
        *(f"{name} {getattr(jax.config, name)}" for name in _TRACING),
        *(f"{name} {os.environ.get(name)}" for name in _VARIABLES),
        f"sources {sources()}",
        f"platform {device.platform} {device.client.platform_version}",
        f"device {device.id} {device.device_kind} {getattr(device, 'compute_capability', None)}",
        f"driver {_first_line(Path('/proc/driver/nvidia/version'))}",
        f"processor {platform.machine()} {processor()} {os.cpu_count()} {os.environ.get('NPROC')}",
    ]
    return "\n".join(values)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def sources() -> str:
    """A digest of this package's modules, by name and text."""
    root, digest = Path(jdllm.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return None


def processor() -> str:
    """The first processor's model and features."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = text.partition("\n\n")[0].splitlines()
    return " ".join(line for line in lines if line.startswith(wanted))
