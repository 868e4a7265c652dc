"""One JAX program over processes of several hosts."""

import jax

from jdllm.arguments import positive, shortened
from jdllm.errors import ConfigError


def join_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    seconds: int = 300,
) -> None:
    """Join the processes of all hosts, before JAX is first used. `jax.devices()` then has the devices of all.

    No generation uses the devices of other processes yet: this is for programs of one's own.

    Arguments:
    - `coordinator`: `HOST:PORT` of process 0, which opens the port; the same in all processes.
    - `processes`: how many there are.
    - `process`: which one this is, from 0.
    - `seconds`: how long to wait for the other processes; then JAX ends this process.

    The first three go together. Without them JAX asks the environment: SLURM's, Open MPI's, or that of
    Kubernetes, for which it needs the package `kubernetes`.

    Raises `ConfigError` for arguments that are wrong or missing, for an environment that names no
    coordinator, and where JAX has been used before.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ConfigError(
            f"{' and '.join(missing)} missing: give coordinator, processes and process, or none"
        )
    if coordinator is not None:
        _check(coordinator, positive("processes", processes, ConfigError), process)
    try:
        jax.distributed.initialize(
            coordinator, processes, process, initialization_timeout=positive("seconds", seconds, ConfigError)
        )
    except (ValueError, RuntimeError) as e:
        where = "the environment" if coordinator is None else coordinator
        raise ConfigError(f"the processes cannot be joined by {where}: {e}") from e


def _check(coordinator: str, processes: int, process: object) -> None:
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"coordinator is {shortened(coordinator)}, expected HOST:PORT, such as 10.0.0.1:1234"
        )
    if type(process) is not int or not 0 <= process < processes:
        raise ConfigError(f"process is {shortened(process)}, expected a number from 0 to {processes - 1}")
