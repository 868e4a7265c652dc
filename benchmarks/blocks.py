"""Tokens per second of block models with random weights.

Run as `python3 -m benchmarks blocks [--shape sdar-8b] [--batch 1 32] [--prompt 1024] [--block 4 32]
[--per-forward 4] [--way fill edit one_by_one]` on a card: equal requests, all at once, of 256 tokens, of
which each forward evaluation fills `--per-forward`. Each block length is that of a model of its own, as
published. `--way` names other ways to generate than filling blocks. Random weights agree with no draft, so
that `forward_ms` alone says something of ways that draft. Where prompts are longer than the published
positions the shape gets as many positions as they need.

The prompts of the timed run are those of the runs before, so their blocks are stored already. A finished
block is stored by the first step of the next one, or where logits are shifted by an evaluation of its own,
which counts. `forward_ms` is a share of the seconds for each evaluation of the device. The floor is the bytes
of the weights that an evaluation reads and of the stored keys and values, which it reads once, over the
measured copy rate.

With `--prefill 32768` prompts are measured instead: `seconds` pass until a prompt is stored and one step has
filled the first block behind it. The prompt of each run begins otherwise, so nothing of it is stored before.
The floor is the arithmetic of the prompt in the layers, block-causal attention counted once, at the measured
rate of matrix products.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.causal import prompts_of
from benchmarks.generations import GEN_LENGTH, measure, settled
from benchmarks.record import Ceilings, measure_ceilings, print_row, record
from benchmarks.shapes import BLOCK_SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.planning.step_time import step_flops, weights_read

_ITEM_BYTES = 2  # of bfloat16

WAYS: dict[str, dict[str, Any]] = {
    "fill": {},
    "edit": {"editing_threshold": 0.5, "max_post_steps": 0},
    "one_by_one": {"block_length": 1, "steps": None},
    "draft": {"generation_mode": "self_speculation", "steps": None},
    "draft_lossy": {
        "transfer": "lossy_speculation",
        "verify_policy": "span",
        "verify_span": 1,
        "steps": None,
    },
}
"""How a request generates, as changes of one that fills blocks."""


def stored_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of the keys and values of so many stored rows."""
    return 2 * _ITEM_BYTES * config.num_layers * config.num_kv_heads * config.head_dim * rows


def with_floor(row: dict[str, Any], moved: float, rate: float) -> dict[str, Any]:
    """A row of the table with the time of an evaluation and its floor.

    Arguments:
    - `row`: of `benchmarks.generations.measure`.
    - `moved`: bytes that an evaluation reads.
    - `rate`: bytes that a copy moves in a second.
    """
    names = ("batch", "prompt", "tokens_s", "seconds", "evaluated", "compiled")
    seconds = row["seconds"] / row["evaluated"]
    return {name: row[name] for name in names} | {
        "forward_ms": 1e3 * seconds,
        "floor_ms": 1e3 * moved / rate,
        "share_of_floor": moved / rate / seconds,
    }


def measured(llm: LLM, batch: int, prompt: int, per_forward: int, way: str, rate: float) -> dict[str, Any]:
    """A row of the table: equal requests, all at once.

    Arguments:
    - `batch`: how many; `prompt`: tokens of each prompt.
    - `per_forward`: tokens that an evaluation fills.
    - `way`: of `WAYS`.
    - `rate`: bytes that a copy moves in a second.
    """
    config, steps = llm.config, GEN_LENGTH // per_forward
    assert config.block_length is not None  # a block model has one
    sampling = SamplingParams(
        gen_length=GEN_LENGTH, steps=steps, block_length=config.block_length, early_stop=False
    ).changed(**WAYS[way])
    assert sampling.block_length is not None  # no way leaves the choice to the model
    moved = weights_read(config, "bfloat16", batch * sampling.block_length)
    moved += batch * stored_bytes(config, prompt + GEN_LENGTH // 2)
    row = with_floor(measure(llm, batch, prompt, sampling), moved, rate)
    return {"block": config.block_length, "per_forward": per_forward, "way": way, **row}


def prefill(llm: LLM, length: int, repeats: int, rate: float) -> dict[str, Any]:
    """A row of the table: the median time of prompts of which nothing is stored.

    Arguments:
    - `length`: tokens of each prompt.
    - `repeats`: how many are timed.
    - `rate`: floating-point operations of matrix products in a second.
    """
    config, seeds = llm.config, itertools.count()
    assert config.block_length is not None  # a block model has one
    sampling = SamplingParams(gen_length=config.block_length, steps=1, early_stop=False)

    def run() -> None:
        prompts = prompts_of(config, 1, length, next(seeds))
        [output] = llm.generate(prompt_token_ids=prompts, sampling=sampling)
        assert not output.num_cached_tokens

    run()
    llm.engine.settle()
    runs = [settled(llm, run) for _ in range(repeats)]
    seconds, floor = statistics.median(one.seconds for one in runs), step_flops(config, length, 0) / rate
    return {
        "block": config.block_length,
        "prompt": length,
        "batched_tokens": llm.account.rows,
        "seconds": seconds,
        "tokens_s": length / seconds,
        "compiled": max(one.made for one in runs),
        "floor_s": floor,
        "share_of_floor": floor / seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("blocks", __doc__)
    parser.add_argument("--shape", choices=BLOCK_SHAPES, default="sdar-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024])
    parser.add_argument("--block", type=int, nargs="+", help="positions; by default those of the shape")
    parser.add_argument("--per-forward", type=int, nargs="+", default=[4], help="tokens")
    parser.add_argument("--way", choices=WAYS, nargs="+", default=["fill"])
    parser.add_argument("--prefill", type=int, nargs="+", default=[], help="tokens; nothing else is measured")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length")
    parser.add_argument("--max-num-batched-tokens", type=int, help="by default as many as LLM chooses")
    args = parser.parse_args(arguments)
    shape, ceilings, table = BLOCK_SHAPES[args.shape], measure_ceilings(), []
    for block in args.block or [shape.block_length]:
        # A last draft reaches beyond the text.
        positions = max(shape.max_positions, max(args.prefill or args.prompt) + GEN_LENGTH + block)
        config = dataclasses.replace(shape, block_length=block, max_positions=positions)
        model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
        with LLM(model, max_num_batched_tokens=args.max_num_batched_tokens, progress=False) as llm:
            for row in rows_of(llm, args, ceilings):
                table.append({"shape": args.shape, **row})
                print_row(table[-1])
    name = f"blocks_{args.shape}" + ("_prefill" if args.prefill else "")
    rates = {"ceiling_tb_s": ceilings.bytes / 1e12, "ceiling_tflops": ceilings.flops / 1e12}
    record(name, table, args.out, **rates)


def rows_of(llm: LLM, args: argparse.Namespace, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """The rows of the table that the options ask for, of one model, as they are measured."""
    # What is compiled stands in for smaller sizes: short prompts come first.
    for length in sorted(args.prefill):
        yield prefill(llm, length, args.repeats, ceilings.flops)
    if not args.prefill:
        for case in itertools.product(args.batch, args.prompt, args.per_forward, args.way):
            yield measured(llm, *case, ceilings.bytes)
