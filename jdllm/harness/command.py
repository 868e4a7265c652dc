"""lm-eval's command line with our model class in it."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Its own models are registered by this import, which lm-eval leaves out once any other model is there.
import lm_eval.models  # pyright: ignore[reportMissingImports]  # noqa: F401
from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

from jdllm.errors import RequestError
from jdllm.harness.arguments import MODEL, with_defaults
from jdllm.harness.model import model_class

_NO_SUCH_TASK = "Tasks not found", "No tasks specified"


def run(arguments: Sequence[str], defaults: Mapping[str, Any], tasks: Path) -> None:
    """Run lm-eval's command line in this process, with the model "jdllm".

    Arguments:
    - `arguments`: lm-eval's, without its name; see `jdllm.harness.arguments.with_defaults`.
    - `defaults`: of `--model_args`.
    - `tasks`: directory of further task files.

    Raises `RequestError` for tasks that lm-eval does not know; whatever else lm-eval refuses it says itself.
    """
    register_model(MODEL)(model_class(defaults))
    with _command_line(["lm-eval", *with_defaults(arguments, tasks)]):
        try:
            cli_evaluate()
        except ValueError as e:
            if not str(e).startswith(_NO_SUCH_TASK):
                raise
            raise RequestError(f"lm-eval: {e}") from None


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = arguments
    try:
        yield
    finally:
        sys.argv = before
