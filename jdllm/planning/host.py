"""How much host memory can be pinned: what the machine has left, and what JAX's runtime allows."""

import os
from pathlib import Path

from jdllm.errors import ConfigError

RUNTIME_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable, in GiB, that JAX reads when it starts."""

_RUNTIME_DEFAULT = 64
_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def check_pinnable(size: int, *, meminfo: Path = _MEMINFO, group: Path = _GROUP) -> None:
    """Raise `ConfigError` where so many bytes of host memory cannot be pinned.

    Arguments:
    - `meminfo`, `group`: where Linux tells of the machine's memory, and of the control group's.
    """
    runtime = runtime_limit()
    if size > runtime:
        raise ConfigError(
            f"host_memory is {size} bytes, and JAX pins at most {runtime}: set"
            f" {RUNTIME_LIMIT}={-(-size // 2**30)} before it starts, or ask for less"
        )
    left = available(meminfo=meminfo, group=group)
    if left is not None and size > left:
        raise ConfigError(f"host_memory is {size} bytes, and this machine has {left} left: ask for less")


def let_pin(size: int) -> None:
    """Let JAX's runtime pin so many bytes, unless the environment says how many; before JAX starts."""
    if size > runtime_limit():
        os.environ.setdefault(RUNTIME_LIMIT, str(-(-size // 2**30)))


def runtime_limit() -> int:
    """Bytes that JAX's runtime pins at most."""
    given = os.environ.get(RUNTIME_LIMIT, "")
    return (int(given) if given.isdecimal() else _RUNTIME_DEFAULT) << 30


def available(*, meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int | None:
    """Bytes of host memory that are left; `None` where nothing tells.

    `meminfo` and `group` are where Linux tells of the memory of the machine and of the control group.
    """
    found = [_of_machine(meminfo), _of_group(group)]
    return min((left for left in found if left is not None), default=None)


def _of_machine(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    kib = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib[0]) << 10 if kib else None


def _of_group(path: Path) -> int | None:
    try:
        most, used = ((path / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - int(used))
