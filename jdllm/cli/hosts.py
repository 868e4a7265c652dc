"""Commands that processes of several hosts run together."""

import contextlib
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import typer

from jdllm.errors import ConfigError, JdllmError

AUTO = "auto"
"""The coordinator of processes that ask the environment."""

_LEFT_SECONDS = 2.0

_OPTIONS: dict[str, Any] = {
    "coordinator": Annotated[
        str | None,
        typer.Option(
            metavar=f"HOST:PORT|{AUTO}",
            help="Run this command together with other processes, on the --devices of all. Process 0 opens"
            f" this port. {AUTO} asks the environment: that of SLURM or of Open MPI.",
            show_default=False,
        ),
    ],
    "processes": Annotated[
        int | None,
        typer.Option(min=1, help="How many processes run this command together.", show_default=False),
    ],
    "process": Annotated[
        int | None, typer.Option(min=0, help="Which of them this is, from 0.", show_default=False)
    ],
}


def runs_on_hosts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command options for processes that run it together. Only the first of them prints."""
    signature = inspect.signature(command)
    keyword, rest = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    options = [
        inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in _OPTIONS.items()
    ]
    parameters = sorted([*signature.parameters.values(), *options], key=lambda one: one.kind is rest)

    @functools.wraps(command)
    def run(*, coordinator: str | None, processes: int | None, process: int | None, **given: Any) -> Any:
        if coordinator is None and processes is None and process is None:
            return command(**given)
        with _joined(coordinator, processes, process):
            return command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def _joined(coordinator: str | None, processes: int | None, process: int | None) -> Iterator[None]:
    """Join the processes; all but the first are silent inside, apart from errors."""
    from jdllm.distributed import join_processes, leads

    if coordinator == AUTO:
        if not (processes is None and process is None):
            raise ConfigError(f"--coordinator {AUTO} has the number of processes from the environment")
        join_processes()
    else:
        join_processes(coordinator, processes, process)
    import jax

    with contextlib.ExitStack() as stack:
        if not leads():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            which = f"process {jax.process_index()} of {jax.process_count()}"
            raise JdllmError(f"{which} cannot go on, perhaps because another one has ended: {e}") from e


def leave(code: int) -> NoReturn:
    """End this process at once with an exit code: JAX would wait for others, which may wait for this one.

    The others end with the first process. It leaves them time to end by themselves: a mistake is mostly
    theirs, too.
    """
    from jdllm.distributed import leads

    if leads():
        time.sleep(_LEFT_SECONDS)
    os._exit(code)


def several() -> bool:
    """Whether this process has joined others."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
