"""How soon a new process has its first block, with an empty and with a full cache of compiled programs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.cases import case_parser
from benchmarks.checkpoints import start_device
from benchmarks.generations import BLOCK_LENGTH, random_prompts
from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from benchmarks.record import record
from benchmarks.shapes import SHAPES
from jdllm.checkpoints.loading import load_params, resolve_dtype
from jdllm.decoding.sampling import Cache, SamplingParams
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf

CACHE: Cache = "dual"


def measure(
    directory: Path, scratch: Path, cache: Path, prompt: int, max_num_batched_tokens: int | None
) -> dict[str, Any]:
    """Load the weights alone, and then all from `LLM(...)` to the end of a first block.

    Arguments:
    - `directory`: a checkpoint.
    - `scratch`: where a small checkpoint is written, that starts the device.
    - `cache`: where executables are kept.
    - `prompt`: tokens of the prompt.

    Returns `batched_tokens`, the rows of a step, and seconds: `load_s` of the weights alone, `llm_s` of the
    constructor with its warm-up, `block_s` of the first block, and `beyond_load_s`, what the last two took
    longer than loading.
    """
    start_device(scratch)
    config = config_from_hf(directory)
    start = time.perf_counter()
    jax.block_until_ready(load_params(directory, config, resolve_dtype(directory, config, "auto")))
    loaded = time.perf_counter()
    sampling = SamplingParams(
        gen_length=BLOCK_LENGTH, block_length=BLOCK_LENGTH, cache=CACHE, early_stop=False
    )
    with LLM(
        directory,
        max_num_batched_tokens=max_num_batched_tokens,
        cache_dir=cache,
        warmup=True,
        progress=False,
    ) as llm:
        ready = time.perf_counter()
        llm.generate(prompt_token_ids=random_prompts(config, [prompt]), sampling=sampling)
        end = time.perf_counter()
    return {
        "batched_tokens": llm.account.rows,
        "load_s": loaded - start,
        "llm_s": ready - loaded,
        "block_s": end - ready,
        "beyond_load_s": (end - loaded) - (loaded - start),
    }


def main(arguments: Sequence[str]) -> None:
    """From `LLM(...)` to the first finished block, in two processes, one after the other.

    `python3 -m benchmarks first_token [--prompt 512] [--max-num-batched-tokens 8192]` on a card, by default
    with the step that `LLM` chooses. The first process finds an empty cache of compiled programs, the second
    one what the first kept. The checkpoint, of random weights (16 GB for llada-8b), stays in the page cache
    where memory allows.
    """
    parser = case_parser("first_token", main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, help="by default as many as LLM chooses")
    parser.add_argument(
        "--directory", type=Path, help="where the checkpoint is written, by default temporary"
    )
    parser.add_argument(
        "--child", type=Path, nargs=2, help="measure this checkpoint with this cache, and print a line"
    )
    args = parser.parse_args(arguments)
    if args.child:
        checkpoint, cache = args.child
        with tempfile.TemporaryDirectory() as scratch:
            row = measure(checkpoint, Path(scratch), cache, args.prompt, args.max_num_batched_tokens)
        print(json.dumps(row), flush=True)
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        checkpoint = write_random_checkpoint(Path(scratch) / args.shape, llada_hf_config(SHAPES[args.shape]))
        child = ["--child", str(checkpoint), str(Path(scratch) / "executables")]
        command = [sys.executable, "-m", "benchmarks", "first_token", *arguments, *child]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
        table = []
        for process in ("first", "second"):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            asked = {"process": process, "shape": args.shape, "prompt": args.prompt}
            table.append(asked | json.loads(done.stdout.splitlines()[-1]))
    record(f"first_token_{args.shape}", table, args.out)
