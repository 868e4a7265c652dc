"""What a card does with each kind of kernels: a report that its owner can send.

Run as `python3 -m benchmarks card [--kernels auto xla] [--layers 4] [--rows 1024 4096] [--out DIR]` on a
card; it takes some minutes, most of them for compiling. Times are those of LLaDA-8B's shape with random
weights in bfloat16: `step_ms` of a full step with so many layers, `block_ms` of a block of 32 rows with the
same layers against its cache, by generation. Before that it generates with the bundled model in float32 and
says whether the tokens are those of the portable forms. What cannot run has its reason instead of figures.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.generations import random_prompts
from benchmarks.record import Ceilings, measure_ceilings, median_seconds, print_row, record
from benchmarks.shapes import SHAPES
from benchmarks.steps.full import compile_step, step_seconds
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.errors import JdllmError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.pallas.device import Kernels
from jdllm.pallas.dispatch import choices
from jdllm.planning.card import visible_card
from jdllm.planning.step_time import step_flops

COPY_BYTES = 256 << 20
"""Nine arrays of this size exist at once; it is more than the L2 cache of any card."""

PROMPT, LENGTH, BLOCK = 512, 128, 32
SPOKEN = ("reverse stressed=", "copy banana without n=", "close ([{=")


def tokens(kernels: Kernels) -> list[list[int]]:
    """What the bundled model says in float32, without noise and with a cache."""
    sampling = SamplingParams(gen_length=32, block_length=8, cache="dual")
    with LLM(
        checkpoint_path(), dtype="float32", kernels=kernels, max_num_batched_tokens=512, progress=False
    ) as llm:
        return [list(map(int, out.token_ids)) for out in llm.generate(list(SPOKEN), sampling)]


def steps(
    config: ModelConfig, rows: Sequence[int], kernels: Kernels, ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Full steps of `rows` rows, half of them masked."""
    params = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16").params()
    for count in rows:
        executable, batch = compile_step(params, config, count, kernels)
        seconds = step_seconds(executable, params, batch)
        floor = step_flops(config, count, count // 2) / ceilings.flops
        yield {"rows": count, "step_ms": 1e3 * seconds, "share_of_products": floor / seconds}


def block_step(config: ModelConfig, kernels: Kernels) -> float:
    """Seconds of a denoising step with a cache, its share of the refreshes included."""
    sampling = SamplingParams(
        gen_length=LENGTH,
        block_length=BLOCK,
        transfer="schedule",
        steps=LENGTH,
        cache="dual",
        early_stop=False,
    )
    (prompt,) = random_prompts(config, [PROMPT])
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    with LLM(model, kernels=kernels, max_num_batched_tokens=PROMPT + LENGTH, progress=False) as llm:
        return median_seconds(lambda: _generated(llm, prompt, sampling), repeats=3, warm_up=1) / LENGTH


def _generated(llm: LLM, prompt: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    (output,) = llm.generate(prompt_token_ids=[prompt], sampling=sampling)
    return np.asarray(output.token_ids)


def rows_of(
    kernels: Kernels, config: ModelConfig, rows: Sequence[int], ceilings: Ceilings, spoken: list[list[int]]
) -> Iterator[dict[str, Any]]:
    """The rows of the report for one kind of kernels; the last has the reason where something cannot run."""
    try:
        if kernels != "xla":
            yield {"kernels": kernels, "what": "tokens", "as_portable": tokens(kernels) == spoken}
        for row in steps(config, rows, kernels, ceilings):
            yield {"kernels": kernels, "what": "step", **row}
        yield {"kernels": kernels, "what": "block", "block_ms": 1e3 * block_step(config, kernels)}
    except (JdllmError, NotImplementedError, RuntimeError) as e:
        yield {"kernels": kernels, "reason": str(e).partition("\n")[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("card", __doc__)
    parser.add_argument("--kernels", nargs="+", choices=get_args(Kernels), default=["auto", "xla"])
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    args = parser.parse_args(arguments)
    card = visible_card()
    config = dataclasses.replace(SHAPES[args.shape], num_layers=args.layers)
    ceilings, spoken, table = measure_ceilings(copy_bytes=COPY_BYTES), tokens("xla"), []
    for kernels in args.kernels:
        for row in rows_of(kernels, config, args.rows, ceilings, spoken):
            table.append(row)
            print_row(row)
    record(
        "card",
        table,
        args.out,
        card=None if card is None else card._asdict(),
        shape=args.shape,
        layers=args.layers,
        ceiling_tflops=ceilings.flops / 1e12,
        ceiling_tb_s=ceilings.bytes / 1e12,
        choices=[choice._asdict() for choice in choices()],
    )
