"""Where the time of a first call goes, and what a serialised executable saves another process.

One process lowers, compiles and serialises a full denoising step and the chain of a cached one, and calls
each twice. Another process loads what that one serialised, and calls it twice. `first_call_s` beyond
`second_call_s` is what a card does with an executable when it first runs. `load_s` close to `compile_s` would
say that kernels are compiled again.

With `--ladder` each process makes an `LLM` instead and warms it up: the first compiles the whole ladder, the
second loads it. `generate_s` is then a first generation of one block, `again_s` a second one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.record import record
from benchmarks.shapes import SHAPES
from benchmarks.steps import cached, full
from jdllm.compiling.executable import (
    Executable,
    Program,
    compiler_options,
    finish,
    from_bytes,
    lower,
    to_bytes,
)
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.weights import Params


class Case(NamedTuple):
    """A program and its name."""

    name: str
    program: Program


def full_step(params: Params, shape: str, rows: int) -> Case:
    """`full.STEPS` steps of one request, half of whose rows are masked."""
    batch, static = full.arguments(SHAPES[shape], rows)
    return Case(f"step_{rows}", Program(full.denoise, (params, batch, np.int32(full.STEPS)), static))


def cached_chain(params: Params, shape: str, fresh: int, rows: int) -> Case:
    """`cached.STEPS` steps of a block of fresh rows, as a chain of kernels."""
    pools = cached.random_cache(SHAPES[shape], rows, fresh, 64, "bfloat16")
    args = params, *pools, jnp.zeros(fresh, jnp.int32), jnp.int32(rows)
    static = {"config": SHAPES[shape], "form": "chain", "steps": cached.STEPS}
    return Case(f"chain_{fresh}", Program(cached.denoise, args, static, chained=True))


def timed(row: dict[str, Any], name: str, run: Callable[[], Any]) -> Any:
    """What `run` returns; `row[name]` becomes the seconds that it took."""
    start = time.perf_counter()
    result = run()
    row[name] = time.perf_counter() - start
    return result


def compile_and_keep(case: Case, directory: Path) -> dict[str, Any]:
    """Lower, compile, serialise and call one program."""
    row: dict[str, Any] = {"program": case.name, "process": "compiles"}
    options = compiler_options(jax.devices()[0].platform, chained=case.program.chained)
    lowered = timed(row, "lower_s", lambda: lower(case.program, options))
    executable = timed(row, "compile_s", lambda: finish(case.program, lowered))
    content = timed(row, "serialise_s", lambda: to_bytes(executable))
    (directory / case.name).write_bytes(content)
    row["mib"] = len(content) / 2**20
    call_twice(executable, case, row)
    return row


def load_and_call(case: Case, directory: Path) -> dict[str, Any]:
    """Load one program that another process kept, and call it twice."""
    row: dict[str, Any] = {"program": case.name, "process": "loads"}
    content = (directory / case.name).read_bytes()
    executable = timed(row, "load_s", lambda: from_bytes(content, case.program, jax.devices()[:1]))
    call_twice(executable, case, row)
    return row


def call_twice(executable: Executable, case: Case, row: dict[str, Any]) -> None:
    """Call an executable twice, each time until its results are there."""
    for name in ("first_call_s", "second_call_s"):
        timed(row, name, lambda: jax.block_until_ready(executable(*case.program.args)))


def warm_up(shape: str, max_num_batched_tokens: int, directory: Path) -> dict[str, Any]:
    """Make an `LLM`, prepare its ladder and generate a block; one row for all of it."""
    model = Transformer(SHAPES[shape], rngs=nnx.Rngs(0), dtype="bfloat16")
    options = {"max_num_batched_tokens": max_num_batched_tokens, "cache_dir": directory / "executables"}
    row: dict[str, Any] = {"program": "ladder"}
    llm = timed(row, "llm_s", lambda: LLM(model, **options))
    row |= {f"warmup_{name}": value for name, value in llm.warmup()._asdict().items()}
    prompt, sampling = np.arange(64), SamplingParams(gen_length=32, cache="dual")
    for name in ("generate_s", "again_s"):
        timed(row, name, lambda: llm.generate(prompt_token_ids=[prompt], sampling_params=sampling))
    return row


def rows_of(args: argparse.Namespace, directory: Path, *, loads: bool) -> Iterator[dict[str, Any]]:
    """What one process measures."""
    if args.ladder:
        row = warm_up(args.shape, args.max_num_batched_tokens, directory)
        yield {"process": "loads" if loads else "compiles"} | row
        return
    params = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16").params()
    chain = cached_chain(params, args.shape, args.fresh, args.cached)
    for case in (full_step(params, args.shape, args.rows), chain):
        yield (load_and_call if loads else compile_and_keep)(case, directory)


def main(arguments: Sequence[str]) -> None:
    parser = case_parser("compile", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--rows", type=int, default=1024, help="rows of the full step")
    parser.add_argument("--fresh", type=int, default=32, help="rows of the cached step")
    parser.add_argument("--cached", type=int, default=4096)
    parser.add_argument("--ladder", action="store_true", help="warm an LLM up instead")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="of that LLM")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loads", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.directory:
        for row in rows_of(args, args.directory, loads=args.loads):
            print(json.dumps(row), flush=True)
        return
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for process in ([], ["--loads"]):
            command = [sys.executable, "-m", "benchmarks", "compile", *arguments, *process]
            with subprocess.Popen(
                [*command, "--directory", directory], stdout=subprocess.PIPE, text=True
            ) as run:
                assert run.stdout is not None
                table += full.parse_rows(run.stdout)
            if run.returncode:
                sys.exit(run.returncode)
    record(f"compile_{args.shape}{'_ladder' if args.ladder else ''}", table, args.out)
