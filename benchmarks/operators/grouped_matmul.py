"""Time of grouped products of LLaDA-MoE's experts against their floor, with random data.

Run as `python3 -m benchmarks grouped_matmul [--rows 8192 32768 131072] [--forms gate_up down gated]
[--implementations mosaic_gpu triton tokamax] [--sweep] [--tiles ...]` on a card. Every figure is the mean
over products with the weights of one layer after the other inside one executable, the median of five calls.
The floor is the larger of bytes over 4.3 TB/s and flops over 700 TFLOP/s. `--sweep` tries the cuts of
`candidates`. tokamax, a peer, needs the extra `bench`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from benchmarks.cases import case_parser
from benchmarks.peers.tokamax_operators import grouped_matmul_tokamax
from benchmarks.record import BYTES_PER_SECOND, FLOPS_PER_SECOND, compiled, median_seconds, record
from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu
from jdllm.pallas.grouped_matmul.tiles import Tiles, default_tiles

GROUPS, LAYERS, HIDDEN, FFN = 64, 4, 2048, 1024
PADDED_ROWS = 8192
"""The portable form is measured with so many rows only: it takes ten times as long."""

LEAST_SECONDS = 8e-3
CHECKED_ROWS = 64
IMPLEMENTATIONS = ("mosaic_gpu", "tokamax", "padded")
SIDES = {"gate_up": (HIDDEN, FFN), "down": (FFN, HIDDEN), "gated": (HIDDEN, FFN)}

Form = Callable[..., jax.Array]


class Operands(NamedTuple):
    """Rows by group, the weights of all layers, and the gates of a gated product."""

    x: jax.Array
    weights: jax.Array
    gate: jax.Array | None
    sizes: jax.Array


def draw(form: str, rows: int, dtype: DTypeLike = jnp.bfloat16) -> Operands:
    """Normal rows and weights, and sizes as if each row chose its group by chance."""
    k, n = SIDES[form]
    keys = jax.random.split(jax.random.key(rows), 3)
    x = jax.random.normal(keys[0], (rows, k), dtype)
    stacks = [
        jax.random.normal(key, (LAYERS * GROUPS, k, n), dtype) * jnp.asarray(k**-0.5, dtype)
        for key in keys[1:]
    ]
    sizes = np.random.default_rng(rows).multinomial(rows, [1 / GROUPS] * GROUPS)
    return Operands(x, stacks[0], stacks[1] if form == "gated" else None, jnp.asarray(sizes, jnp.int32))


def floor_seconds(form: str, rows: int) -> float:
    (k, n), matrices = SIDES[form], 1 + (form == "gated")
    flops = 2.0 * rows * k * n * matrices
    moved = 2.0 * (GROUPS * k * n * matrices + rows * (k + n))
    return max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)


def compiled_form(form: Form, operands: Operands, floor: float) -> tuple[Callable[[], jax.Array], int]:
    """Products layer after layer for several milliseconds, compiled, and how many of them are one call's."""
    inner = max(2 * LAYERS, int(LEAST_SECONDS / floor))

    def repeat(operands: Operands) -> jax.Array:
        def body(i: jax.Array, last: jax.Array) -> jax.Array:
            x, sizes, _ = lax.optimization_barrier((operands.x, operands.sizes, last))
            first = lax.rem(i, LAYERS) * GROUPS
            return form(x, operands.weights, sizes, first_group=first, gate=operands.gate)

        shape = (operands.x.shape[0], operands.weights.shape[2])
        return lax.fori_loop(0, inner, body, jnp.zeros(shape, operands.x.dtype))

    return functools.partial(compiled(repeat, operands), operands), inner


def relative_error(form: Form, operands: Operands) -> float:
    """Of some rows with the last layer's weights, against products in f32, in the norm."""
    first = (LAYERS - 1) * GROUPS
    out = jax.jit(functools.partial(form, first_group=first))(
        operands.x, operands.weights, operands.sizes, gate=operands.gate
    )
    rows = np.linspace(0, len(operands.x) - 1, CHECKED_ROWS).astype(int)
    group = first + np.searchsorted(np.cumsum(operands.sizes), rows, side="right")
    x = np.asarray(operands.x[rows], np.float64)

    def product(weights: jax.Array) -> np.ndarray:
        each = [row @ np.asarray(weights[g], np.float64) for row, g in zip(x, group, strict=True)]
        return np.stack(each)

    exact = product(operands.weights)
    if operands.gate is not None:
        gate = product(operands.gate)
        exact *= gate / (1 + np.exp(-gate))
    return float(np.linalg.norm(np.asarray(out[rows], np.float64) - exact) / np.linalg.norm(exact))


def candidates(n: int, matrices: int) -> list[Tiles]:
    """Cuts worth trying, the default first."""
    if matrices == 2:
        others = ["128,2,1,2,1,4", "128,2,1,1,2,4", "64,2,1,1,1,6", "64,3,1,1,1,5"]
        others += ["128,1,1,1,1,5", "128,2,1,1,1,3"]
    else:
        others = ["256,2,1,2,1,4", "256,2,1,1,2,4", "128,2,1,1,1,6", "128,3,1,1,1,4", "128,2,2,1,1,3"]
        others += ["256,1,1,1,1,5", "128,2,1,2,1,6", "256,2,1,1,1,3"]
    return [default_tiles(n, matrices), *(parse_tiles(f"{matrices},{cut}") for cut in others)]


def form_of(implementation: str) -> Form:
    """A form of `jdllm.pallas.grouped_matmul`, or "tokamax"."""
    if implementation == "tokamax":
        return grouped_matmul_tokamax
    return functools.partial(grouped_matmul, implementation=cast(Any, implementation))


def measure(
    rows: Sequence[int] = (8192, 32768, 131072),
    forms: Sequence[str] = tuple(SIDES),
    implementations: Sequence[str] = IMPLEMENTATIONS,
    tilings: Callable[[int, int], Sequence[Tiles]] | None = None,
) -> list[dict[str, Any]]:
    """A row of the table for each number of rows, form and implementation.

    Arguments:
    - `rows`: of a call, all groups together.
    - `forms`: keys of `SIDES`.
    - `implementations`: "padded" is measured up to 8192 rows only; "tokamax" where it is installed.
    - `tilings`: the cuts to measure instead, of matrices with n columns and of their number.
    """
    table = []
    for form in forms:
        for number in rows:
            operands, (k, n) = draw(form, number), SIDES[form]
            floor, matrices = floor_seconds(form, number), 1 + (form == "gated")
            runs: list[tuple[dict[str, Any], Form]] = []
            if tilings is not None:
                for tiles in tilings(n, matrices):
                    kernel = functools.partial(grouped_matmul_mosaic_gpu, tiles=tiles)
                    runs.append(({"implementation": "mosaic_gpu", **dataclasses.asdict(tiles)}, kernel))
            else:
                for name in implementations:
                    if name != "padded" or number <= PADDED_ROWS:
                        runs.append(({"implementation": name}, form_of(name)))
            for columns, function in runs:
                try:
                    call, inner = compiled_form(function, operands, floor)
                    seconds = median_seconds(call) / inner
                except RuntimeError as e:
                    if columns["implementation"] != "tokamax":
                        raise
                    print(f"tokamax: no row for {form} of {number} rows: {e}", flush=True)
                    continue
                table.append(
                    {
                        "rows": number,
                        "k": k,
                        "n": n,
                        "form": form,
                        **columns,
                        "ms": 1e3 * seconds,
                        "tflops": 2e-12 * number * k * n * matrices / seconds,
                        "floor_ms": 1e3 * floor,
                        "share_of_floor": floor / seconds,
                        "error": relative_error(function, operands),
                    }
                )
                print({key: table[-1][key] for key in ("rows", "form", *columns, "ms", "tflops")}, flush=True)
    return table


def parse_tiles(text: str) -> Tiles:
    """`matrices,columns,row_groups,column_groups,row_blocks,column_blocks,stages[,processors]`."""
    return Tiles(*map(int, text.split(",")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("grouped_matmul", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--forms", nargs="+", choices=SIDES, default=list(SIDES))
    choices = (*IMPLEMENTATIONS, "triton")
    parser.add_argument("--implementations", nargs="+", choices=choices, default=IMPLEMENTATIONS)
    parser.add_argument("--sweep", action="store_true", help="all candidate cuts, fastest first")
    parser.add_argument("--tiles", type=parse_tiles, nargs="+", help=parse_tiles.__doc__)
    args = parser.parse_args(arguments)
    tilings = candidates if args.sweep else None
    if args.tiles:
        tilings = lambda n, matrices: [tiles for tiles in args.tiles if tiles.matrices == matrices]  # noqa: E731
    table = measure(args.rows, args.forms, args.implementations, tilings)
    if tilings is not None:
        table.sort(key=lambda row: (row["form"], row["rows"], row["ms"]))
    record("grouped_matmul" + "_sweep" * (tilings is not None), table, args.out)
