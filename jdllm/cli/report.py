"""What the commands write to which stream, and their exit codes."""

import contextlib
import errno
import os
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from jdllm.cli.hosts import leave, several
from jdllm.cli.options import in_option_words
from jdllm.errors import DoesNotFitError, JdllmError, RequestError

USER_MISTAKE = 2
DOES_NOT_FIT = 3

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO)
_TEXTS = {"prompts", "texts", "prompt"}
"""Arguments that are texts, which may begin with a dash."""


class LineError(RequestError):
    """A mistake in a line of input, in the words of that line's own keys."""


class Commands(TyperGroup):
    """Reports a user's mistake, of the command line or of the library, as one line and exit code 2.

    What does not fit the memory ends with 3.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                if sys.stdout is None:
                    raise JdllmError("standard output is closed: nothing could be printed")
                code = super().main(*args, standalone_mode=False, **extra)
            except typer.TyperException as e:
                _say("error", e.format_message() + _dash_hint(e))
                code = USER_MISTAKE
            except JdllmError as e:
                _say("error", str(e) if isinstance(e, LineError) else in_option_words(str(e)))
                code = DOES_NOT_FIT if isinstance(e, DoesNotFitError) else USER_MISTAKE
            except OSError as e:
                if e.errno not in _WRITE_ERRORS or e.filename is not None:
                    raise
                _drop_output()
                _say("error", f"the output cannot be written: {e.strerror}")
                code = USER_MISTAKE
        if code and several():
            leave(code)
        sys.exit(code)


def print_result(text: str) -> None:
    """Print to standard output."""
    # Flushed here, where a reader that has closed the pipe is still met without a traceback.
    print(text, flush=True)


def _drop_output() -> None:
    """Drop what standard output has refused: the interpreter flushes it once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dash_hint(error: typer.TyperException) -> str:
    """How a text that begins with a dash is given, where it was taken for an option."""
    context = getattr(error, "ctx", None)
    if not hasattr(error, "option_name") or context is None:
        return ""
    names = {parameter.name for parameter in context.command.params}
    return " (put -- before a text that begins with a dash)" if names & _TEXTS else ""


def _say(kind: str, message: str) -> None:
    # There may be no standard error either: `print` would take standard output for None.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"{kind}: {' '.join(message.split())}", file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any) -> None:
    _say("warning", str(message))
