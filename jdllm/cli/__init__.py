"""The command line: one module for each command.

Standard output carries results only; warnings, progress and errors go to standard error. A user's mistake is
one line there and exit code 2. JAX is imported only once a command needs it.
"""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from jdllm.cli import convert, evaluate, generate, infill, plan, score
from jdllm.cli.report import Commands, print_result

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names off
)
app.command("generate")(generate.generate)
app.command("infill")(infill.infill)
app.command("score")(score.score)
app.command("eval")(evaluate.evaluate)
app.command("convert")(convert.convert)
app.command("plan")(plan.plan)

CACHE_BYTES = 2**30
"""What compiled programs may take on disk, those used least recently given up first."""


def _print_version(asked: bool) -> None:
    if asked:
        print_result(f"jdllm {version('jdllm')}")
        raise typer.Exit


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Diffusion language models in JAX."""


def main() -> None:
    """Entry point of the `jdllm` command. What it compiles is kept for the next time, as JAX keeps it."""
    keep_compiled_programs()
    app()


def keep_compiled_programs() -> None:
    """Have JAX keep compiled programs in the user's cache directory, unless its own variables say otherwise.

    Has an effect before JAX is imported.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jdllm" / "compiled"
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(CACHE_BYTES))
