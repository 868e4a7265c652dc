"""What a library user waits for in a new process: first blocks with the defaults, nothing warmed up."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import case_parser
from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from benchmarks.record import record
from benchmarks.shapes import SHAPES

ROOT = Path(__file__).parents[1]
PROCESS = Path(__file__).with_name("first_calls_process.py")


def measure(checkout: Path, checkpoint: Path, caches: Path) -> list[dict[str, Any]]:
    """The rows of one process that runs the jdllm of a checkout, with the user's cache directory `caches`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    environment |= {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(caches)}
    command = [sys.executable, "-P", str(PROCESS), str(checkpoint)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(arguments: Sequence[str]) -> None:
    """First blocks of one request, of one with a cache, of 16 and of 32 ragged ones, in two new processes.

    `python3 -m benchmarks first_calls [--against DIR]` on a card. The first process finds an empty cache of
    executables, the second one what the first kept. `beyond_load_s` is what the call and `LLM(...)` take
    beyond loading the weights, `again_s` the same call a second time. The checkpoint, of random weights
    (16 GB for llada-8b), stays in the page cache where memory allows.
    """
    parser = case_parser("first_calls", main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--against", type=Path, help="a checkout of another commit, measured too")
    parser.add_argument(
        "--directory", type=Path, help="where the checkpoint is written, by default temporary"
    )
    args = parser.parse_args(arguments)
    checkouts = {"this": ROOT} | ({"other": args.against} if args.against else {})
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        checkpoint = write_random_checkpoint(Path(scratch) / args.shape, llada_hf_config(SHAPES[args.shape]))
        for code, checkout in checkouts.items():
            for process in ("first", "second"):
                rows = measure(checkout, checkpoint, Path(scratch) / f"caches-{code}")
                table += [{"code": code, "process": process} | row for row in rows]
    record(f"first_calls_{args.shape}", table, args.out)
