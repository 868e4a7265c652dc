"""Processes join one JAX program: here two on one host, over the CPU's collectives."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from jdllm.distributed import join_processes
from jdllm.errors import ConfigError
from tests.helpers import ROOT

PROGRAM = """
import json, sys
from jdllm.distributed import join_processes
join_processes(*json.loads(sys.argv[1]))
import jax, numpy as np
mesh, spec = jax.make_mesh((2,), ("processes",)), jax.P("processes")
mine = np.array([10.0 ** jax.process_index()], np.float32)
shared = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), mine)
add = jax.shard_map(lambda x: jax.lax.psum(x, "processes"), mesh=mesh, in_specs=spec, out_specs=jax.P())
print(json.dumps([jax.process_index(), jax.process_count(), float(add(shared)[0])]))
"""


def start(arguments: list[Any], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process with one device of the CPU."""
    further = {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
        cwd=ROOT,
        env={**os.environ, **further, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port(first: int = 0, last: int = 0) -> int:
    """A port that nobody has, of a range."""
    for port in range(first, last + 1):
        try:
            with socket.create_server(("localhost", port)) as taken:
                return taken.getsockname()[1]
        except OSError:
            continue
    raise AssertionError("no port is free")


def by_arguments() -> list[tuple[list[Any], dict[str, str]]]:
    coordinator = f"localhost:{free_port()}"
    return [([coordinator, 2, process], {}) for process in range(2)]


def by_slurm() -> list[tuple[list[Any], dict[str, str]]]:
    # JAX takes the port from the number of the job: 61440 and its last 12 bits.
    job = {"SLURM_JOB_ID": str(free_port(61440, 65535) - 61440), "SLURM_STEP_NODELIST": "localhost"}
    ids = [{"SLURM_PROCID": str(process), "SLURM_LOCALID": str(process)} for process in range(2)]
    return [([], {**job, "SLURM_NTASKS": "2", **one}) for one in ids]


@pytest.mark.parametrize("told", [by_arguments, by_slurm])
def test_two_processes_add_what_they_have(told: Any):
    started = [start(arguments, variables) for arguments, variables in told()]
    try:
        answers = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], answers
    assert [json.loads(out.splitlines()[-1]) for out, _ in answers] == [[0, 2, 11.0], [1, 2, 11.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator": "a:1"}, "processes and process missing: give coordinator, processes and process"),
        ({"processes": 2, "process": 0}, "coordinator missing"),
        ({"coordinator": "a:1", "processes": 2}, "process missing"),
        ({"coordinator": "a", "processes": 2, "process": 0}, "coordinator is 'a', expected HOST:PORT"),
        ({"coordinator": "a:x", "processes": 2, "process": 0}, "coordinator is 'a:x', expected HOST:PORT"),
        ({"coordinator": "a:1", "processes": 0, "process": 0}, "processes is 0, expected a positive integer"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "process is 2, expected a number from 0 to 1"),
        ({"coordinator": "a:1", "processes": 2, "process": -1}, "process is -1, expected a number from 0"),
        ({"seconds": 0}, "seconds is 0, expected a positive integer"),
    ],
)
def test_arguments_that_are_wrong_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        join_processes(**arguments)


def test_a_process_that_has_used_jax_cannot_join():
    jax.devices()
    with pytest.raises(ConfigError, match=r"cannot be joined by localhost:1: .*before any JAX"):
        join_processes("localhost:1", 2, 0)


def test_an_environment_that_names_no_coordinator_is_refused():
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORDINATOR"))
    } | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", "from jdllm.distributed import join_processes; join_processes()"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ConfigError: the processes cannot be joined by the environment" in ran.stderr
