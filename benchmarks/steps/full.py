"""Time of one full denoising step with random weights, by default half of the rows masked and evaluated.

Run as `python3 -m benchmarks step [--shape llada-8b] [--rows 1024 4096] [--mask-ratio 0.1 0.5 0.9]
[--kernels auto triton] [--dtype float32] [--quantization none fp8] [--peers] [--out DIR]` on a card.
The floor is the larger of flops over the measured matrix rate, which is that of bfloat16, and weight bytes
over the measured copy rate. `--peers` measures the same step in plain JAX and, where it is installed, in
torch; `ratio` is a peer's time over ours, that of the first of our rows. With fp8 among the quantizations
torch multiplies floats of 8 bits, too.
"""

import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

import jax
import numpy as np

from benchmarks.cases import case_parser
from benchmarks.peers import jax_step
from benchmarks.peers.torch_cases import FLOAT8, SYSTEMS
from benchmarks.record import Ceilings, compiled, measure_ceilings, median_seconds, record
from benchmarks.shapes import SHAPES
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import temp_bytes
from jdllm.compiling.over_cards import everywhere
from jdllm.decoding.batch import Batch
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.engine_options import QUANTIZATIONS
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, init_params, param_bytes
from jdllm.pallas.device import Kernels, preferring, target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.ladder import bucket_entry
from jdllm.planning.step_time import step_flops
from jdllm.planning.templates import attention_form as planned_attention
from jdllm.serving.packing import demand, pack
from jdllm.serving.request import Request
from jdllm.serving.spec import generation_spec

STEPS = 4
HALF = 0.5
MAX_NUM_LOGITS = 512
OURS = "jdllm"


def attention_form(config: ModelConfig, kernels: Kernels = "auto", dtype: str = "bfloat16") -> str:
    """The attention that a step runs by default here."""
    with preferring(kernels):
        return planned_attention(config, dtype, target()).name


def masked_rows(rows: int, mask_ratio: float) -> int:
    """How many of the rows are masked; half of an odd number is rounded down."""
    return int(rows * mask_ratio)


def arguments(config: ModelConfig, rows: int, mask_ratio: float = HALF) -> tuple[Batch, dict[str, Any]]:
    """The batch, on the device, and the static arguments of `denoise` for a request of `rows` tokens.

    Its last rows are masked, in one block.
    """
    masked = masked_rows(rows, mask_ratio)
    sampling = SamplingParams(gen_length=masked)
    ids = min(100_000, config.vocab_size // 2)
    prompt = np.random.default_rng(0).integers(0, ids, rows - masked)
    request = Request(generation_spec(prompt, sampling, config))
    batch = pack([request], config, bucket_entry(*demand(request))).batch
    static = {
        "config": config,
        "mask_id": config.mask_id,
        "chunks": ChunkConfig(logits=math.ceil(batch.head.row.shape[0] / MAX_NUM_LOGITS)),
        "level": Level.TOP,
    }
    return jax.device_put(batch), static


def compile_step(
    params: Params, config: ModelConfig, rows: int, kernels: Kernels = "auto", mask_ratio: float = HALF
) -> tuple[jax.stages.Compiled, Batch]:
    """The executable for `arguments`, which takes (params, batch, steps), and the batch."""
    batch, static = arguments(config, rows, mask_ratio)
    batch = jax.tree.map(lambda x: everywhere(x, params), batch)
    return compiled(denoise, params, batch, np.int32(1), kernels=kernels, **static), batch


def step_seconds(executable: jax.stages.Compiled, params: Params, batch: Batch) -> float:
    """Seconds of a step, of several in one call of what `compile_step` returns."""
    return median_seconds(lambda: executable(params, batch, np.int32(STEPS))) / STEPS


def measure(
    params: Params,
    config: ModelConfig,
    rows: int,
    ceilings: Ceilings,
    kernels: Kernels = "auto",
    mask_ratio: float = HALF,
) -> dict[str, float | int | str]:
    """One row of the table, without the name of the shape."""
    dtype = params["embed"].dtype.name
    start = time.perf_counter()
    executable, batch = compile_step(params, config, rows, kernels, mask_ratio)
    compile_seconds = time.perf_counter() - start
    seconds = step_seconds(executable, params, batch)
    masked = masked_rows(rows, mask_ratio)
    flops = step_flops(config, rows, masked)
    floor = max(flops / ceilings.flops, param_bytes(config, dtype) / ceilings.bytes)
    return {
        "rows": rows,
        "masked": masked,
        **({} if config.quantization is None else {"quantization": config.quantization}),
        **({} if kernels == "auto" else {"kernels": kernels}),
        "attention": attention_form(config, kernels, dtype),
        "step_ms": 1e3 * seconds,
        "floor_ms": 1e3 * floor,
        "share_of_ceiling": floor / seconds,
        "tflops": flops / seconds / 1e12,
        "temp_mib": temp_bytes(executable) / 2**20,
        "compile_s": compile_seconds,
    }


def jax_rows(params: Params, shape: str, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of plain JAX; none, with a printed line, where it cannot run the shape."""
    for count in rows:
        try:
            measured = jax_step.measure(params, SHAPES[shape], count, STEPS)
        except NotImplementedError as e:
            print(f"jax: no row for {shape}: {e}")
            return
        yield {"shape": shape, "rows": count, "masked": count // 2, "system": "jax", **measured}


def torch_rows(shape: str, rows: Sequence[int], systems: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of torch, from a process of its own; what it says in words is printed."""
    command = [sys.executable, "-m", "benchmarks", "torch_step", "--shape", shape]
    command += ["--rows", *map(str, rows), "--systems", *systems]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    measured = list(parse_rows(process.stdout))
    if process.wait():
        print(f"{' '.join(command[1:])} ended with status {process.returncode}")
    return measured


def parse_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows among the lines that a peer's process prints; all lines are passed on as they come."""
    for line in lines:
        print(line, end="", flush=True)
        if line.startswith("{"):
            yield json.loads(line)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows` by count of rows, ours first; those of peers with their time over ours."""
    ours = {row["rows"]: row["step_ms"] for row in reversed(rows) if row["system"] == OURS}

    def compared(row: dict[str, Any]) -> dict[str, Any]:
        return row if row["system"] == OURS else row | {"ratio": row["step_ms"] / ours[row["rows"]]}

    return sorted(map(compared, rows), key=lambda row: row["rows"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("step", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--mask-ratio", type=float, nargs="+", default=[HALF], help="masked rows per row")
    parser.add_argument(
        "--kernels", nargs="+", choices=get_args(Kernels), default=["auto"], help="ratios are to the first"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantization", choices=("none", *QUANTIZATIONS), nargs="+", default=["none"])
    parser.add_argument("--peers", action="store_true", help="measure the same step elsewhere too")
    args = parser.parse_args(arguments)
    if args.peers and args.dtype != "bfloat16":
        parser.error("peers run in bfloat16")
    if args.peers and args.mask_ratio != [HALF]:
        parser.error("peers have half of the rows masked: leave --mask-ratio or --peers out")
    if not all(0 < masked_rows(rows, r) < rows for rows in args.rows for r in args.mask_ratio):
        parser.error(f"--mask-ratio {args.mask_ratio}: expected numbers that mask some rows and leave some")
    # Before anything of JAX, whose pool is never given back.
    systems = (*SYSTEMS, FLOAT8) if "fp8" in args.quantization else SYSTEMS
    torch = torch_rows(args.shape, args.rows, systems) if args.peers else []
    ceilings, table = measure_ceilings(), []
    for quantization in args.quantization:
        config = SHAPES[args.shape].quantised(None if quantization == "none" else quantization)
        params = init_params(config, jax.random.key(0), args.dtype)
        for rows, ratio, kernels in itertools.product(args.rows, args.mask_ratio, args.kernels):
            measured = measure(params, config, rows, ceilings, kernels, ratio)
            table.append({"system": OURS, "shape": args.shape, **measured})
            print(json.dumps(table[-1]), flush=True)
        del params
    if args.peers:
        params = init_params(SHAPES[args.shape], jax.random.key(0), args.dtype)
        for row in jax_rows(params, args.shape, args.rows):
            table.append(row)
            print(json.dumps(row), flush=True)
    suffix = "" if args.kernels == ["auto"] else "_" + "-".join(args.kernels)
    suffix += "" if args.dtype == "bfloat16" else f"_{args.dtype}"
    suffix += "" if args.quantization == ["none"] else "_" + "-".join(args.quantization)
    suffix += "" if args.mask_ratio == [HALF] else "_masked" + "-".join(f"{r:g}" for r in args.mask_ratio)
    record(
        f"step_{args.shape}{suffix}",
        with_ratios([*table, *torch]),
        args.out,
        ceiling_tflops=ceilings.flops / 1e12,
        ceiling_tb_s=ceilings.bytes / 1e12,
    )
