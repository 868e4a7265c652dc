"""The command line: one module for each command.

Standard output carries results only; warnings, progress and errors go to standard error. A user's mistake is
one line there and exit code 2. JAX is imported only once a command needs it.
"""

import atexit
import gc
from typing import Annotated

import typer

from jdllm import __version__
from jdllm.cli import bench, convert, evaluate, generate, infill, plan, run_batch, score, serve, warmup
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
app.command("eval", cls=evaluate.EvalCommand)(evaluate.evaluate)
app.command("warmup")(warmup.warmup)
app.command("serve")(serve.serve)
app.command("run-batch")(run_batch.run_batch)
app.add_typer(bench.app, name="bench")
app.command("convert")(convert.convert)
app.command("plan")(plan.plan)

GARBAGE_THRESHOLD = 100_000
"""Objects after which garbage is looked for. Imports make many more, none of them garbage: with Python's own
threshold they are looked through again and again, for a tenth of a short command's time."""


def _print_version(asked: bool) -> None:
    if asked:
        print_result(f"jdllm {__version__}")
        raise typer.Exit


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Diffusion language models in JAX."""


def main() -> None:
    """Entry point of the `jdllm` command."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    atexit.register(gc.freeze)  # what is left at the end goes with the process: looking through it takes long
    app()
