"""What the commands write to which stream, and their exit codes."""

import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from jdllm.errors import JdllmError

USER_MISTAKE = 2


class Commands(TyperGroup):
    """Reports a user's mistake, of the command line or of the library, as one line and exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                code = super().main(*args, standalone_mode=False, **extra)
            except typer.TyperException as e:
                _say("error", e.format_message())
                code = USER_MISTAKE
            except JdllmError as e:
                _say("error", str(e))
                code = USER_MISTAKE
        sys.exit(code)


def print_result(text: str) -> None:
    """Print to standard output."""
    # Flushed here, where a reader that has closed the pipe is still met without a traceback.
    print(text, flush=True)


def _say(kind: str, message: str) -> None:
    print(f"{kind}: {' '.join(message.split())}", file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any) -> None:
    _say("warning", str(message))
