"""Tokens per second of 32 requests of different lengths at once, beside what their arithmetic alone takes.

Run as `python3 -m benchmarks.ragged [--cache head_sparse] [--delay 1 0] [--max-num-batched-tokens 8192 ...]
[--requests 32]` on a card: random bf16 weights, 256 tokens in 256 steps, blocks of 32; the prompt lengths are
those of `benchmarks/workloads/ragged32.json`. Each setting runs twice, and the second run is timed. The floor
is the arithmetic of all steps at the rate that full steps of jdllm reach; `share_of_floor` is the floor's
seconds over those measured.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from benchmarks.generate import generation, measure_prompts
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.decoding.caches import Phase, kept, phase
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.module import Transformer
from jdllm.planning.step_time import RATES, step_flops

WORKLOAD = Path(__file__).parent / "workloads" / "ragged32.json"
CACHES = ("none", "dual", "sparse", "head_sparse")
"""The caches of which a reuse evaluates the block and nothing else, so that its rows are known."""


def prompt_lengths() -> list[int]:
    """Tokens of the workload's prompts."""
    return json.loads(WORKLOAD.read_text())["prompt_lengths"]


def generation_flops(config: ModelConfig, sampling: SamplingParams, prompt: int) -> float:
    """Floating-point operations of one request of `prompt` tokens that commits one token a step.

    A full step and a refresh evaluate the whole sequence, a reuse the block against what is stored; the head
    sees the masked rows of the block.

    Arguments:
    - `sampling`: with one of `CACHES`, and as many steps as tokens.
    """
    length, block = prompt + sampling.gen_length, sampling.block_length or sampling.gen_length
    stored = kept(sampling, length - block)
    total = 0.0
    for step in range(block):
        if phase(sampling, step) is Phase.REUSE:
            # A segment that sees itself whole has as many keys as rows.
            further_keys = 4.0 * config.num_layers * config.num_heads * config.head_dim * block * stored
            total += step_flops(config, block, block - step) + further_keys
        else:
            total += step_flops(config, length, block - step)
    return total * (sampling.gen_length // block)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=["head_sparse"])
    parser.add_argument("--retention", type=float, default=0.5)
    parser.add_argument("--delay", type=int, nargs="+", default=[1, 0])
    parser.add_argument("--max-num-batched-tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--requests", type=int, help="only the first of them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    config, rate = SHAPES[args.shape], RATES["h200"].flops
    lengths = prompt_lengths()[: args.requests]
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    table = []
    for max_num_batched_tokens in args.max_num_batched_tokens:
        llm = LLM(model, max_num_batched_tokens=max_num_batched_tokens, progress=False)
        for cache, delay in itertools.product(args.cache, args.delay):
            sampling = generation(cache, args.retention, None if cache == "none" else delay)
            floor = sum(generation_flops(config, sampling, length) for length in lengths) / rate
            asked = {"shape": args.shape, "requests": len(lengths), "batched_tokens": max_num_batched_tokens}
            row = asked | measure_prompts(llm, lengths, sampling)
            row["floor_tokens_s"] = len(lengths) * sampling.gen_length / floor
            row["share_of_floor"] = floor / row["seconds"]
            table.append(row)
            print_row(row)
        del llm
    record(f"ragged_{args.shape}", table, args.out, floor_tflops=rate / 1e12)


if __name__ == "__main__":
    main()
