"""Time of products of many rows with matrices in few bits, beside products with the same matrices in 16 bits.

Run as `python3 -m benchmarks quantised_matmul [--shapes llada-8b] [--rows 128 256 512 1024 2048]
[--quantization int8] [--implementations bfloat16 mosaic_gpu triton xla] [--sweep]` on a card. One executable
multiplies with layer after layer of stacks that are larger than the L2 cache, again and again. "bfloat16" are
XLA's products with weights in 16 bits. "xla" widens each matrix in memory, and multiplies then. `--sweep`
tries all cuts of the kernel.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

from benchmarks.cases import case_parser
from benchmarks.operators.skinny_matmul import (
    Form,
    Product,
    draw,
    products_of,
    relative_error,
    repeated,
)
from benchmarks.record import FLOPS_PER_SECOND, compiled, median_seconds, record
from benchmarks.shapes import SHAPES
from jdllm.engine_options import QUANTIZATIONS
from jdllm.layers import linear
from jdllm.models.weights import quantise
from jdllm.pallas.quantised_matmul import quantised_matmul
from jdllm.pallas.quantised_matmul.mosaic_gpu import quantised_matmul_mosaic_gpu
from jdllm.pallas.quantised_matmul.tiles import BLOCK_ROWS, CLUSTERS, CONSUMERS, Tiles
from jdllm.quantised import KINDS, Quantised, Shifted, WeightForm

LEAST_SECONDS = 20e-3  # of one call
PLAIN = "bfloat16"
IMPLEMENTATIONS = (PLAIN, "mosaic_gpu", "xla")


def form_of(implementation: str, tiles: Tiles | None) -> tuple[Form, bool]:
    """A form, and whether it takes a layer's own matrices rather than the stacks."""
    if implementation == PLAIN:
        return lambda x, stacks, layer, own: tuple(linear(x, w) for w in own), True
    multiply: Any = functools.partial(quantised_matmul, implementation=cast(Any, implementation))
    if tiles is not None:
        multiply = functools.partial(quantised_matmul_mosaic_gpu, tiles=tiles)
    return lambda x, stacks, layer, own: tuple(multiply(x, w, layer=layer) for w in stacks), False


def candidates(product: Product, rows: int, kind: type[Quantised]) -> list[Tiles]:
    """All cuts of a product with matrices of a kind."""
    of_kind = functools.partial(Tiles, bits=kind.bits, shifted=issubclass(kind, Shifted))
    found = itertools.starmap(of_kind, itertools.product(BLOCK_ROWS, CONSUMERS, CLUSTERS))
    wide = math.gcd(*product.outputs)
    return [tiles for tiles in found if wide % (tiles.columns * tiles.cluster) == 0 and tiles.rows < 2 * rows]


def measure(
    shape: str,
    rows: int,
    quantization: WeightForm,
    implementations: Sequence[str] = IMPLEMENTATIONS,
    sweep: bool = False,
) -> list[dict[str, Any]]:
    """A row of the table for each product of a layer and each form, or each cut of the kernel."""
    table = []
    for name, gated_product in products_of(SHAPES[shape]).items():
        product = gated_product._replace(gated=False)
        x, plain = draw(product, rows)
        narrow = tuple(quantise(w, quantization) for w in plain)
        flops = 2 * rows * product.k * sum(product.outputs)
        repeats = math.ceil(LEAST_SECONDS * FLOPS_PER_SECOND / (len(plain[0]) * flops))
        cases: list[tuple[str, Tiles | None]] = [(implementation, None) for implementation in implementations]
        if sweep:
            cases = [("mosaic_gpu", tiles) for tiles in candidates(product, rows, KINDS[quantization])]
        for implementation, tiles in cases:
            stacks = plain if implementation == PLAIN else narrow
            executable = compiled(repeated(*form_of(implementation, tiles), repeats), x, stacks)
            call = functools.partial(executable, x, stacks)
            seconds = median_seconds(call) / (len(plain[0]) * repeats)
            table.append(
                {
                    "shape": shape,
                    "product": name,
                    "rows": rows,
                    "quantization": None if implementation == PLAIN else quantization,
                    "implementation": implementation,
                    **(dataclasses.asdict(tiles) if tiles else {}),
                    "us": 1e6 * seconds,
                    "tflop_s": flops / seconds / 1e12,
                    "share_of_ceiling": flops / seconds / FLOPS_PER_SECOND,
                    "error": relative_error(call(), x, stacks, gated=False),
                }
            )
            print(table[-1], flush=True)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("quantised_matmul", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llada-8b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="int8", help="of the weights")
    choices = (*IMPLEMENTATIONS, "triton")
    parser.add_argument("--implementations", nargs="+", choices=choices, default=IMPLEMENTATIONS)
    parser.add_argument("--sweep", action="store_true", help="all cuts of the kernel")
    args = parser.parse_args(arguments)
    table = []
    for shape, rows in itertools.product(args.shapes, args.rows):
        table += measure(shape, rows, args.quantization, args.implementations, args.sweep)
    record(f"quantised_matmul_{args.quantization}" + "_sweep" * args.sweep, table, args.out)
