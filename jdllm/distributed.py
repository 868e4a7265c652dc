"""One JAX program over processes of several hosts: how they join, and how they agree."""

import hashlib
import socket
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdllm.arguments import positive, shortened
from jdllm.errors import ConfigError

_TRIED_SECONDS, _PAUSE_SECONDS = 5.0, 0.2
"""For one attempt to reach process 0, and before the next."""


def join_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    seconds: int = 300,
) -> None:
    """Join the processes of all hosts, before JAX is first used. `jax.devices()` then has the devices of all.

    `LLM(model, devices=N)` then runs on the devices of all. Every process makes the same calls, in the same
    order and in one thread, and gets the same results.

    Arguments:
    - `coordinator`: `HOST:PORT` of process 0, which opens the port; the same in all processes.
    - `processes`: how many there are.
    - `process`: which one this is, from 0.
    - `seconds`: how long to wait for the other processes. If process 0 has not opened its port by then, that
      is an error; if another process is missing, JAX ends this one.

    The first three go together. Without them JAX asks the environment: SLURM's, Open MPI's, or that of
    Kubernetes, for which it needs the package `kubernetes`.

    Raises `ConfigError` for arguments that are wrong or missing, for an environment that names no
    coordinator, for one that nobody reaches, and where JAX has been used before.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ConfigError(
            f"{' and '.join(missing)} missing: give coordinator, processes and process, or none"
        )
    if coordinator is not None:
        _check(coordinator, positive("processes", processes, ConfigError), process)
    end = time.monotonic() + positive("seconds", seconds, ConfigError)
    if coordinator is not None and process:
        _await_port(coordinator, end)
    try:
        jax.distributed.initialize(coordinator, processes, process, initialization_timeout=seconds)
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


def _await_port(coordinator: str, end: float) -> None:
    """Wait until process 0 listens: JAX would end this process without a word about the address."""
    host, _, port = coordinator.rpartition(":")
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_TRIED_SECONDS).close()
            return
        except OSError as e:
            if time.monotonic() >= end:
                raise ConfigError(
                    f"nobody answers at coordinator {coordinator} ({e}): start process 0 there"
                ) from None
            time.sleep(_PAUSE_SECONDS)


def leads() -> bool:
    """Whether this is the process that writes what all have found: the first one, or the only one."""
    return jax.process_index() == 0


def least(values: Sequence[int]) -> list[int]:
    """The least that any process has, of each value. All processes call this at once."""
    return _of_all(values).min(axis=0).tolist()


def from_first(values: Sequence[int]) -> list[int]:
    """The values of the first process. All processes call this at once, with as many values."""
    return _of_all(values)[0].tolist()


def check_same(what: str, text: str) -> None:
    """Raise `ConfigError` where processes have different texts. All processes call this at once.

    Arguments:
    - `what`: the text tells of, for the message.
    """
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    (found,) = zip(*_of_all([digest]).tolist(), strict=True)
    others = [process for process, one in enumerate(found) if one != found[0]]
    if others:
        raise ConfigError(
            f"processes 0 and {others[0]} have different {what}: start all with the same command"
        )


def _of_all(values: Sequence[int]) -> np.ndarray:
    """int64 `[processes, values]`: what each process has. JAX sends them in words of 32 bits."""
    words = np.array(values, np.int64).view(np.uint32)
    return np.asarray(multihost_utils.process_allgather(words)).view(np.int64)
