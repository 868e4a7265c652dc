"""Steps on one card and on several of one host, with random weights.

Run as `python3 -m benchmarks cards [--shape llada-8b] [--devices 1 2 4] [--rows 1024 4096 16384 32768]
[--layers parts whole] [--cached 4096] [--collective]` on a machine with as many cards: a full step of each
number of rows, of which half are masked and evaluated, and a step of `--fresh` rows against `--cached` stored
ones. The full step runs with a part of each layer on each card, or with whole layers, where the cards deal
rows out. The layers of the other step are a chain of kernels, which do the sums over cards, if the cards can;
with `--collective` XLA does the sums over several cards, and the layers are no chain. `times` is how often a
step of the first number of cards takes as long. Floors are those of one card over the number of cards: what
cards send each other is no part of them.
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
from jdllm.models.whole_layers import WHOLE
from jdllm.planning.step_time import step_flops, weights_read


def placed(
    params: Params, config: ModelConfig, *, collective: bool = False, whole_layers: bool = False
) -> Params:
    """The weights as steps on `config.cards` cards take them.

    Arguments:
    - `collective`: whether XLA's collective does all sums, also where the cards can exchange.
    - `whole_layers`: whether each card has all layers beside its part of them.
    """
    parts = in_parts(jax.device_put(params, weight_shardings(config)), config, whole_layers=whole_layers)
    return {name: x for name, x in parts.items() if name != ADDRESSES} if collective else parts


def full_steps(
    params: Params, config: ModelConfig, layers: str, rows: Sequence[int], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """A row of the table for each full step.

    Arguments:
    - `params`: as `placed` returns them.
    - `layers`: "whole" to deal out the rows of steps with enough of them; otherwise cards have parts.
    - `rows`: of each step.
    """
    if layers == "parts":
        params = {name: x for name, x in params.items() if name != WHOLE}
    for count in rows:
        executable, batch = full.compile_step(params, config, count)
        seconds = full.step_seconds(executable, params, batch)
        needed = step_flops(config, count, count // 2) / ceilings.flops
        floor = max(needed, param_bytes(config, "bfloat16") / ceilings.bytes)
        yield _row("full", config, layers, count, seconds, floor)


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
    return _row("cached", config, "parts", fresh, median_seconds(run) / cached.STEPS, floor)


def _row(
    step: str, config: ModelConfig, layers: str, rows: int, seconds: float, floor: float
) -> dict[str, Any]:
    floor /= config.cards
    return {
        "step": step,
        "rows": rows,
        "devices": config.cards,
        "layers": "whole" if config.cards == 1 else layers,
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
    return sorted(compared, key=lambda row: (row["step"], row["rows"], row["devices"], row["layers"]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("cards", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="*", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--layers", nargs="+", choices=["parts", "whole"], default=["whole"])
    parser.add_argument("--fresh", type=int, default=32)
    parser.add_argument("--cached", type=int, default=4096, help="0 leaves this step out")
    parser.add_argument("--collective", action="store_true", help="XLA does all sums over cards")
    args = parser.parse_args(arguments)
    ceilings = measure_ceilings()
    whole = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16").params()
    weights = weights_read(SHAPES[args.shape], "bfloat16", args.fresh)
    table = []
    for cards in args.devices:
        config = dataclasses.replace(SHAPES[args.shape], cards=cards)
        params = placed(whole, config, collective=args.collective, whole_layers="whole" in args.layers)
        if args.cached:
            table.append(cached_step(params, config, args.fresh, args.cached, weights, ceilings))
            print_row(table[-1])
        for layers in args.layers if cards > 1 else ["whole"]:
            for row in full_steps(params, config, layers, args.rows, ceilings):
                table.append(row)
                print_row(row)
    record(
        f"cards_{args.shape}{'_collective' if args.collective else ''}",
        with_times(table),
        args.out,
        ceiling_tflops=ceilings.flops / 1e12,
        ceiling_tb_s=ceilings.bytes / 1e12,
    )
