"""Tokens per second of block models with random weights.

Run as `python3 -m benchmarks blocks [--shape sdar-8b] [--batch 1 32] [--prompt 1024] [--block 4 32]
[--per-forward 4] [--way fill edit one_by_one]` on a card: equal requests, all at once, of 256 tokens, of
which each forward evaluation fills `--per-forward`. Each block length is that of a model of its own, as
published. `--way` names other ways to generate than filling blocks. Random weights agree with no draft, so
that `forward_ms` alone says something of ways that draft.

The prompts of the timed run are those of the runs before, so their blocks are stored already. A finished
block is stored by the first step of the next one, or where logits are shifted by an evaluation of its own,
which counts. `forward_ms` is a share of the seconds for each evaluation of the device. The floor is the bytes
of the weights that an evaluation reads and of the stored keys and values, which it reads once, over the
measured copy rate.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.generations import GEN_LENGTH, measure
from benchmarks.record import measure_ceilings, print_row, record
from benchmarks.shapes import BLOCK_SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.planning.step_time import weights_read

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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("blocks", __doc__)
    parser.add_argument("--shape", choices=BLOCK_SHAPES, default="sdar-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024])
    parser.add_argument("--block", type=int, nargs="+", help="positions; by default those of the shape")
    parser.add_argument("--per-forward", type=int, nargs="+", default=[4], help="tokens")
    parser.add_argument("--way", choices=WAYS, nargs="+", default=["fill"])
    args = parser.parse_args(arguments)
    shape, rate, table = BLOCK_SHAPES[args.shape], measure_ceilings().bytes, []
    for block in args.block or [shape.block_length]:
        config = dataclasses.replace(shape, block_length=block)
        model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
        with LLM(model, progress=False) as llm:
            for case in itertools.product(args.batch, args.prompt, args.per_forward, args.way):
                table.append({"shape": args.shape, **measured(llm, *case, rate)})
                print_row(table[-1])
    record(f"blocks_{args.shape}", table, args.out, ceiling_tb_s=rate / 1e12)
