"""The command line: one module for each command.

Standard output carries results only; warnings, progress and errors go to standard error. A user's mistake is
one line there and exit code 2. JAX is imported only once a command needs it.
"""

import os
from pathlib import Path

import typer

from jdllm.cli import convert, evaluate, generate, plan
from jdllm.cli.report import Commands

app = typer.Typer(
    cls=Commands,
    help="Diffusion language models in JAX.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names off
)
app.command("generate")(generate.generate)
app.command("eval")(evaluate.evaluate)
app.command("convert")(convert.convert)
app.command("plan")(plan.plan)


def main() -> None:
    """Entry point of the `jdllm` command. What it compiles is kept for the next time, as JAX keeps it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jdllm" / "compiled"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    app()
