"""Steps on one card and on several of one host, with random weights.

Run as `python3 -m benchmarks cards [--shape llada-8b] [--devices 1 2 4] [--rows 1024 4096 16384 32768]
[--cached 4096] [--collective]` on a machine with as many cards: a full step of each number of rows, of
which half are masked and evaluated, and a step of `--fresh` rows against `--cached` stored ones. Its layers
are a chain of kernels, which do the sums over cards, if the cards can; with `--collective` XLA does the sums
over several cards, and the layers are no chain. `times` is how often a step of the first number of cards
takes as long. Floors are those of one card over the number of cards: what cards send each other is no part of
them.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.record import Ceilings, measure_ceilings, median_seconds, print_row, record
from benchmarks.shapes import SHAPES
from benchmarks.steps import cached, full
from jdllm.compiling.over_cards import part_of_card
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.module import Transformer
from jdllm.models.cards import ADDRESSES
from jdllm.models.config import ModelConfig
from jdllm.models.spread import in_parts, weight_shardings
from jdllm.models.weights import Params, param_bytes
from jdllm.planning.step_time import step_flops, weights_read


def placed(params: Params, config: ModelConfig, *, collective: bool = False) -> Params:
    """The weights as steps on `config.cards` cards take them.

    Arguments:
    - `collective`: whether XLA's collective does all sums, also where the cards can exchange.
    """
    parts = in_parts(jax.device_put(params, weight_shardings(config)), config)
    return {name: x for name, x in parts.items() if name != ADDRESSES} if collective else parts


def full_steps(
    params: Params, config: ModelConfig, rows: Sequence[int], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """A row of the table for each full step.

    Arguments:
    - `params`: as `placed` returns them.
    - `rows`: of each step.
    """
    for count in rows:
        executable, batch = full.compile_step(params, config, count)
        seconds = full.step_seconds(executable, params, batch)
        needed = step_flops(config, count, count // 2) / ceilings.flops
        floor = max(needed, param_bytes(config, "bfloat16") / ceilings.bytes)
        yield _row("full", config, count, seconds, floor)


def cached_step(
    params: Params, config: ModelConfig, fresh: int, stored: int, weights: float, ceilings: Ceilings
) -> dict[str, Any]:
    """The row of the step of a block.

    Arguments:
    - `weights`: bytes of the weights that the step reads, of all cards together.
    """
    form = "chain" if chains(part_of_card(params), config.on_card(), fresh) else "layers"
    run = cached.compile_step(params, config, fresh=fresh, cached=stored, form=form)
    pool_bytes = sum(pool.nbytes for pool in run.inputs[1:3])
    floor = (weights + pool_bytes) / ceilings.bytes
    return _row("cached", config, fresh, median_seconds(run) / cached.STEPS, floor)


def _row(step: str, config: ModelConfig, rows: int, seconds: float, floor: float) -> dict[str, Any]:
    floor /= config.cards
    return {
        "step": step,
        "rows": rows,
        "devices": config.cards,
        "step_ms": 1e3 * seconds,
        "floor_ms": 1e3 * floor,
        "share_of_floor": floor / seconds,
    }


def with_times(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, step by step, each with how often a step of the first number of cards takes as long."""
    first: dict[tuple[str, int], float] = {}
    for row in table:
        first.setdefault((row["step"], row["rows"]), row["step_ms"])
    compared = [row | {"times": first[row["step"], row["rows"]] / row["step_ms"]} for row in table]
    return sorted(compared, key=lambda row: (row["step"], row["rows"], row["devices"]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("cards", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="*", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--fresh", type=int, default=32)
    parser.add_argument("--cached", type=int, default=4096)
    parser.add_argument("--collective", action="store_true", help="XLA does all sums over cards")
    args = parser.parse_args(arguments)
    ceilings = measure_ceilings()
    whole = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16").params()
    weights = weights_read(SHAPES[args.shape], "bfloat16", args.fresh)
    table = []
    for cards in args.devices:
        config = dataclasses.replace(SHAPES[args.shape], cards=cards)
        params = placed(whole, config, collective=args.collective)
        table.append(cached_step(params, config, args.fresh, args.cached, weights, ceilings))
        print_row(table[-1])
        for row in full_steps(params, config, args.rows, ceilings):
            table.append(row)
            print_row(row)
    record(
        f"cards_{args.shape}{'_collective' if args.collective else ''}",
        with_times(table),
        args.out,
        ceiling_tflops=ceilings.flops / 1e12,
        ceiling_tb_s=ceilings.bytes / 1e12,
    )
