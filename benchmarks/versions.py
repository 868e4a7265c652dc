"""Several versions of jdllm, by turns in one process on one card.

Run as `python3 -m benchmarks.versions DIR DIR... [--shape llada-8b] [--fresh 32] [--cached 4096]` on a card,
each `DIR` a checkout of this repository (`git worktree add --detach DIR COMMIT` makes one). One card differs
from another by more than most changes do, and from one minute to the next: only what takes turns can be
compared. Each version's steps are those of its own `benchmarks.cached_step`; the weights are made once. The
last columns are of each version alone for seconds, with the energy of a step.

`python3 -m benchmarks.versions DIR DIR... --operator masked_logits --rows 256` runs each version's own
benchmark of an operator instead, with the options that follow its name, all versions once and then once more.
"""

import argparse
import contextlib
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import jax
from flax import nnx

from benchmarks.kernels import OPERATORS
from benchmarks.record import record, seconds_of, sustained
from benchmarks.shapes import SHAPES
from jdllm.models.module import Transformer

ROUNDS = 16
QUEUED = 2  # calls of one turn
TURNS = 2  # of operators, whose benchmarks compile again

_OURS = ("benchmarks", "jdllm")


@contextlib.contextmanager
def version(directory: Path, module: str = "benchmarks.cached_step") -> Iterator[ModuleType]:
    """A module of a checkout, whose modules are the ones that imports find meanwhile."""

    def ours() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] in _OURS}

    path, modules = list(sys.path), ours()
    for name in modules:
        del sys.modules[name]
    sys.path[:] = [str(directory.absolute()), *(entry for entry in path if not _is_checkout(entry))]
    try:
        yield importlib.import_module(module)
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules |= modules
        sys.path[:] = path


def _is_checkout(entry: str | Path) -> bool:
    return all(Path(entry, name).is_dir() for name in _OURS)


def by_turns(runs: Sequence[Callable[[], Any]], rounds: int = ROUNDS) -> list[list[float]]:
    """Seconds of a call of each of `runs`, in every round, of several behind each other."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, own in zip(runs, times, strict=True):
            seconds_of(run, QUEUED)
            own.append(seconds_of(run, QUEUED) / QUEUED)
    return times


def measure(directories: Sequence[Path], shape: str, fresh: int, cached: int) -> list[dict[str, Any]]:
    """A row of the table for each version."""
    config = SHAPES[shape]
    params = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16").params()
    runs, steps = [], []
    for directory in directories:
        with version(directory) as module:
            its_config = module.SHAPES[shape]
            run = module.compile_step(params, its_config, fresh=fresh, cached=cached)
            jax.block_until_ready(run())
            runs.append(run)
            steps.append(module.STEPS)
    table = []
    for directory, run, count, times in zip(directories, runs, steps, by_turns(runs), strict=True):
        alone = sustained(run)
        step_ms = [1e3 * seconds / count for seconds in times]
        joules = {"joules": alone.seconds / count * alone.state["watts"]} if alone.state else {}
        table.append(
            {
                "version": str(directory),
                "shape": shape,
                "fresh": fresh,
                "cached": cached,
                "step_ms": statistics.median(step_ms),
                "least_ms": min(step_ms),
                "most_ms": max(step_ms),
                "sustained_ms": 1e3 * alone.seconds / count,
                **alone.state,
                **joules,
            }
        )
    return table


def measure_operator(
    directories: Sequence[Path], operator: str, arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of each version's own table, in every turn."""
    table = []
    for turn in range(TURNS):
        for directory in directories:
            print(f"{directory}, turn {turn}", flush=True)
            with (
                version(directory, f"benchmarks.operators.{operator}") as module,
                TemporaryDirectory() as out,
            ):
                module.main([*arguments, "--out", out])
                for file in sorted(Path(out).iterdir()):
                    rows = json.loads(file.read_text())["rows"]
                    table += [{"version": str(directory), "turn": turn, **row} for row in rows]
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--fresh", type=int, default=32)
    parser.add_argument("--cached", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--operator", nargs=argparse.REMAINDER, help="its name, and options of its benchmark")
    args = parser.parse_args(arguments)
    for directory in args.directories:
        if not _is_checkout(directory):
            parser.error(f"{directory} is no checkout of this repository: it has no {' and no '.join(_OURS)}")
    if args.operator is None:
        table = measure(args.directories, args.shape, args.fresh, args.cached)
        record(f"versions_{args.shape}", table, args.out)
        return
    operator, *options = args.operator or [""]
    if operator not in OPERATORS:
        parser.error(f"there is no operator {operator!r}: expected one of {', '.join(OPERATORS)}")
    table = measure_operator(args.directories, operator, options)
    record(f"versions_{operator}", table, args.out)


if __name__ == "__main__":
    main()
