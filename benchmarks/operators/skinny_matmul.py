"""Time of the products of a layer with few rows against the bandwidth of a device copy.

Run as `python3 -m benchmarks skinny_matmul [--shapes llada-8b dream-7b] [--rows 32]
[--implementations mosaic_gpu triton xla] [--quantization int8] [--sweep]` on a card. One executable
multiplies with layer after layer of stacks that are larger than the L2 cache, again and again; XLA's products
scan over the stacks, as the models do. `--sweep` tries the cuts of `candidates`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from benchmarks.cases import case_parser
from benchmarks.record import BYTES_PER_SECOND, compiled, median_seconds, record
from benchmarks.shapes import SHAPES
from jdllm.engine_options import QUANTIZATIONS
from jdllm.layers import linear
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import nbytes
from jdllm.models.weights import quantise
from jdllm.pallas.hopper import padded_rows
from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.pallas.skinny_matmul.mosaic_gpu import skinny_matmul_mosaic_gpu
from jdllm.pallas.skinny_matmul.tiles import WIDE, Tiles, column_unit, default_tiles, most_turns
from jdllm.quantised import KINDS, Quantised, Shifted, WeightForm

STACK_BYTES = 512 * 2**20  # of all layers: ten times the L2 cache
LEAST_SECONDS = 8e-3  # of one call
IMPLEMENTATIONS = ("mosaic_gpu", "xla")

Results = tuple[jax.Array, ...]
Stack = jax.Array | Quantised
Form = Callable[[jax.Array, tuple[Stack, ...], jax.Array, tuple[Stack, ...]], Results]
"""From rows, the stacks of all layers, the layer and its own matrices."""


class Product(NamedTuple):
    """Outputs of each weight that the rows are multiplied with, their inputs, and whether two are gated."""

    outputs: tuple[int, ...]
    k: int
    gated: bool = False

    def bytes_moved(self, rows: int, stacks: Sequence[Stack]) -> int:
        results = self.outputs[:1] if self.gated else self.outputs
        weights = sum(nbytes(stack) // stack.shape[0] for stack in stacks)
        return weights + 2 * rows * (self.k + sum(results))


def products_of(config: ModelConfig) -> dict[str, Product]:
    """The products of a dense layer."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    heads, kv_heads = (config.head_dim * number for number in (config.num_heads, config.num_kv_heads))
    return {
        "qkv": Product((heads, kv_heads, kv_heads), hidden),
        "o": Product((hidden,), heads),
        "gate_up": Product((ffn, ffn), hidden, gated=True),
        "down": Product((hidden,), ffn),
    }


def draw(
    product: Product, rows: int, dtype: DTypeLike = jnp.bfloat16
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Normal rows and stacks of weights that keep the size of what they multiply."""
    one_layer = 2 * sum(product.outputs) * product.k
    layers = max(2, -(-STACK_BYTES // one_layer))
    keys = jax.random.split(jax.random.key(rows), 1 + len(product.outputs))
    scale = jnp.asarray(product.k**-0.5, dtype)
    x = jax.random.normal(keys[0], (rows, product.k), dtype)
    weights = zip(keys[1:], product.outputs, strict=True)
    return x, tuple(jax.random.normal(key, (layers, n, product.k), dtype) * scale for key, n in weights)


def by_xla(x: jax.Array, own: Sequence[Stack], gated: bool) -> Results:
    """The products as the models write them."""
    products = tuple(linear(x, w) for w in own)
    return (jax.nn.silu(products[0]) * products[1],) if gated else products


def form_of(implementation: str, gated: bool, tiles: Tiles | None = None) -> tuple[Form, bool]:
    """A form, and whether it takes a layer's own matrices rather than the stacks."""
    if implementation == "xla":
        return lambda x, stacks, layer, own: by_xla(x, own, gated), True
    if tiles is not None:
        kernel = functools.partial(skinny_matmul_mosaic_gpu, tiles=tiles)
    else:
        kernel = functools.partial(skinny_matmul, implementation=cast(Any, implementation))
    return lambda x, stacks, layer, own: kernel(x, stacks, layer=layer, gated=gated), False


def at_layer(stacks: Sequence[Stack], layer: int) -> tuple[Stack, ...]:
    """The layer's own matrices."""
    return jax.tree.map(lambda stack: stack[layer], tuple(stacks))


def repeated(form: Form, sliced: bool, repeats: int) -> Callable[..., Results]:
    """Multiply with every layer, `repeats` times over."""

    def run(x: jax.Array, stacks: tuple[Stack, ...]) -> Results:
        layers = jnp.arange(stacks[0].shape[0])

        def layer(last: Results, at: tuple[jax.Array, tuple[Stack, ...]]) -> tuple[Results, None]:
            again, _ = lax.optimization_barrier((x, last))  # nothing moves out of the loop
            return form(again, stacks, *at), None

        def once(_: int, last: Results) -> Results:
            return lax.scan(layer, last, (layers, stacks if sliced else ()))[0]

        results = jax.eval_shape(lambda: form(x, stacks, layers[0], at_layer(stacks, 0)))
        return lax.fori_loop(0, repeats, once, tuple(jnp.zeros(r.shape, r.dtype) for r in results))

    return run


def compiled_form(
    form: Form, sliced: bool, x: jax.Array, stacks: tuple[Stack, ...], product: Product
) -> tuple[Callable[[], Results], int]:
    """Calls of a form with layer after layer, compiled, and how many of them are one call's."""
    moved = product.bytes_moved(len(x), stacks)
    repeats = math.ceil(LEAST_SECONDS * BYTES_PER_SECOND / (stacks[0].shape[0] * moved))
    executable = compiled(repeated(form, sliced, repeats), x, stacks)
    return functools.partial(executable, x, stacks), stacks[0].shape[0] * repeats


def relative_error(actual: Results, x: jax.Array, stacks: Sequence[Stack], gated: bool) -> float:
    """Of the last layer's results, against f32 of the highest precision, in the norm."""
    last = at_layer(stacks, -1)
    own = [w if isinstance(w, Quantised) else w.astype(jnp.float32) for w in last]
    expected = by_xla(x.astype(jnp.float32), own, gated)
    a, b = (np.concatenate([np.asarray(v, np.float64) for v in each], 1) for each in (actual, expected))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def candidates(product: Product, rows: int, kind: type[Quantised] | None) -> list[Tiles]:
    """Cuts worth trying, the default first: others around it with all stages, and itself with fewer."""
    bits, shifted = kind.bits if kind else WIDE, kind is not None and issubclass(kind, Shifted)
    padded, unit = padded_rows(rows), column_unit(bits)
    options = {"gated": product.gated, "bits": bits, "shifted": shifted}
    default = default_tiles(padded, product.outputs, product.k, **options)
    fewer = max(1, default.stages * 2 // (3 * default.turns)) * default.turns
    cuts = [dataclasses.replace(default, stages=stages) for stages in (default.stages, fewer)]
    factors = itertools.product((0.5, 0.75, 1, 1.25, 1.5, 2), (1,) if product.gated else (0.5, 1, 2))
    for wider, more in factors:
        columns, splits = int(default.columns * wider) // unit * unit, math.ceil(default.splits * more)
        turns = max(1, most_turns(columns, product.gated, bits))
        for stages in range(24, 2, -1):
            try:
                tiles = Tiles(columns, splits, stages, bits, turns, shifted)
                tiles.check(padded, product.outputs, product.k, gated=product.gated)
            except NotImplementedError:
                continue
            cuts.append(tiles)
            break
    return list(dict.fromkeys(cuts))


def measure(
    shape: str,
    rows: int = 32,
    implementations: Sequence[str] = IMPLEMENTATIONS,
    sweep: bool = False,
    quantization: WeightForm | None = None,
) -> list[dict[str, Any]]:
    """A row of the table for each product of a layer and each form, or each of its cuts."""
    table = []
    for name, product in products_of(SHAPES[shape]).items():
        x, stacks = draw(product, rows)
        if quantization is not None:
            stacks = tuple(quantise(stack, quantization) for stack in stacks)
        moved = product.bytes_moved(rows, stacks)
        cuts: list[tuple[str, Tiles | None]] = [(implementation, None) for implementation in implementations]
        if sweep:
            cuts = [
                ("mosaic_gpu", tiles)
                for tiles in candidates(product, rows, KINDS[quantization] if quantization else None)
            ]
        for implementation, tiles in cuts:
            form = form_of(implementation, product.gated, tiles)
            call, number = compiled_form(*form, x, stacks, product)
            seconds = median_seconds(call) / number
            table.append(
                {
                    "shape": shape,
                    "product": name,
                    "rows": rows,
                    "implementation": implementation,
                    "quantization": quantization,
                    **(dataclasses.asdict(tiles) if tiles else {}),
                    "us": 1e6 * seconds,
                    "tb_s": moved / seconds / 1e12,
                    "share_of_copy": moved / seconds / BYTES_PER_SECOND,
                    "error": relative_error(call(), x, stacks, product.gated),
                }
            )
            print(table[-1], flush=True)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("skinny_matmul", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llada-8b", "dream-7b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    choices = (*IMPLEMENTATIONS, "triton")
    parser.add_argument("--implementations", nargs="+", choices=choices, default=IMPLEMENTATIONS)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the weights")
    parser.add_argument("--sweep", action="store_true", help="all candidate cuts")
    args = parser.parse_args(arguments)
    table = []
    for shape, rows in itertools.product(args.shapes, args.rows):
        table += measure(shape, rows, args.implementations, args.sweep, args.quantization)
    quantised = f"_{args.quantization}" if args.quantization else ""
    record("skinny_matmul" + quantised + "_sweep" * args.sweep, table, args.out)
