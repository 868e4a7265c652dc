"""Time of one full denoising step with random weights, half of the rows masked and evaluated.

Run as `python3 -m benchmarks.step [--shape llada-8b] [--rows 1024 4096] [--out DIR]` on a card.
The floor is the larger of flops over the measured matrix rate and weight bytes over the measured copy rate.
"""

import argparse
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.record import Ceilings, measure_ceilings, median_seconds, record
from benchmarks.shapes import SHAPES, step_flops
from jdllm.decoding.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.models.config import ModelConfig
from jdllm.models.module import Transformer
from jdllm.models.weights import Params, param_bytes
from jdllm.pallas.attention.tokamax_adapter import check_tokamax
from jdllm.pallas.device import target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.chunks import ChunkConfig
from jdllm.serving.packing import pack
from jdllm.serving.request import generation_request

STEPS = 4
MAX_NUM_LOGITS = 512


def attention_form(config: ModelConfig) -> str:
    """The attention that a step runs by default here."""
    q = jax.ShapeDtypeStruct((1, config.num_heads, config.head_dim), jnp.bfloat16)
    try:
        check_tokamax(q, target())
    except NotImplementedError:
        return "xla"
    return "tokamax"


def measure(params: Params, shape: str, rows: int, ceilings: Ceilings) -> dict[str, float | int | str]:
    """One row of the table: a request of `rows` tokens whose second half is masked, in one block."""
    config = SHAPES[shape]
    executables = Executables(jax.devices()[0].platform)
    sampling = SamplingParams(gen_length=rows // 2)
    prompt = np.random.default_rng(0).integers(0, 100_000, rows - rows // 2)
    batch = pack([generation_request(0, prompt, sampling, config)], config).batch
    static = {
        "config": config,
        "mask_id": config.mask_id,
        "chunks": ChunkConfig(logits=math.ceil(batch.head.row.shape[0] / MAX_NUM_LOGITS)),
        "level": Level.TOP,
    }
    batch = jax.device_put(batch)
    start = time.perf_counter()
    executable = executables.compile(denoise, params, batch, np.int32(1), **static)
    compile_seconds = time.perf_counter() - start
    seconds = median_seconds(lambda: executable(params, batch, np.int32(STEPS))) / STEPS
    flops = step_flops(config, rows, rows // 2)
    floor = max(flops / ceilings.flops, param_bytes(config, jnp.bfloat16) / ceilings.bytes)
    return {
        "shape": shape,
        "rows": rows,
        "masked": rows // 2,
        "attention": attention_form(config),
        "step_ms": 1e3 * seconds,
        "floor_ms": 1e3 * floor,
        "share_of_ceiling": floor / seconds,
        "tflops": flops / seconds / 1e12,
        "temp_mib": executable.memory_analysis().temp_size_in_bytes / 2**20,
        "compile_s": compile_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ceilings = measure_ceilings()
    params = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16").params()
    table = [measure(params, args.shape, rows, ceilings) for rows in args.rows]
    record(
        f"step_{args.shape}",
        table,
        args.out,
        ceiling_tflops=ceilings.flops / 1e12,
        ceiling_tb_s=ceilings.bytes / 1e12,
    )


if __name__ == "__main__":
    main()
