"""Time of Split-S attention against the bandwidth of a device copy.

Run as `python3 -m benchmarks split_attention [--sweep] [--shapes 32x32 32x8] [--keys 4096 16384]
[--page-rows 64] [--requests 1] [--fp8] [--implementations chained mosaic_gpu]` on a card. One executable
attends to each layer of a pool that is larger than the L2 cache, again and again. Each form is measured with
contiguous keys and with as many in four scattered segments whose last pages are partial; "chained" is the
kernel as part of a chain (`jdllm.pallas.chain`). `--fp8` takes a pool in 8 bits, and `--sweep` tries the cuts
of `candidates`. Each shape has its own file.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from benchmarks.cases import case_parser
from benchmarks.record import BYTES_PER_SECOND, compiled, median_seconds, print_row, record
from jdllm.pallas.attention import AttentionOutput
from jdllm.pallas.hopper import padded_rows
from jdllm.pallas.split_attention import PageTable, split_attention
from jdllm.pallas.split_attention.mosaic_gpu import split_attention_mosaic_gpu
from jdllm.pallas.split_attention.tiles import Tiles, default_tiles
from jdllm.stored_rows import Float8Rows

POOL_BYTES = 256 * 2**20  # of keys and values: four times the L2 cache
LEAST_SECONDS = 5e-3  # of one call
SEGMENTS = (0.1, 0.2, 0.3, 0.4)
QUERIES, HEAD_DIM = 32, 128
HEADS = ("32x32", "32x8", "28x4", "32x4")
KEYS = (4096, 16384, 65536, 131072)

FORMS: dict[str, dict[str, Any]] = {
    "chained": {"implementation": "mosaic_gpu", "chained": True},
    "mosaic_gpu": {"implementation": "mosaic_gpu"},
    "triton": {"implementation": "triton"},
    "xla": {"implementation": "xla"},
}

Form = Callable[..., AttentionOutput]


def make_table(keys: int, page_rows: int, segments: Sequence[float], requests: int) -> tuple[PageTable, int]:
    """A table with `keys` keys for each request, and the pages that the pool must have.

    Each segment has its share of the keys and lies in a run of pages; several are in a random order, with a
    gap after each.
    """
    rng = np.random.default_rng(0)
    cuts = [round(keys * share) for share in np.cumsum([0, *segments])]
    lengths = np.diff(cuts).tolist() * requests
    starts, at = {}, 0
    for index in rng.permutation(len(lengths)) if len(segments) > 1 else range(len(lengths)):
        starts[index] = at
        at += -(-lengths[index] // page_rows) + (len(segments) > 1)
    pages, valid, first = [], [], [0]
    for index, length in enumerate(lengths):
        used = -(-length // page_rows)
        pages += range(starts[index], starts[index] + used)
        valid += [min(page_rows, length - i * page_rows) for i in range(used)]
        if index % len(segments) == len(segments) - 1:
            first.append(len(pages))
    return PageTable(*(np.array(x, np.int32) for x in (pages, valid, first))), at


def repeated(form: Form, layers: int, repeats: int) -> Callable[..., list[AttentionOutput]]:
    """Attend to every layer, `repeats` times over."""
    traced_once = jax.jit(form)

    def once(q: jax.Array, k: jax.Array, v: jax.Array, table: PageTable) -> list[AttentionOutput]:
        return [traced_once(q, k, v, table, layer=jnp.int32(layer)) for layer in range(layers)]

    def run(q: jax.Array, k: jax.Array, v: jax.Array, table: PageTable) -> list[AttentionOutput]:
        def body(_: int, last: list[AttentionOutput]) -> list[AttentionOutput]:
            again, _ = lax.optimization_barrier((q, last))  # nothing moves out of the loop
            return once(again, k, v, table)

        return lax.fori_loop(0, repeats - 1, body, once(q, k, v, table))

    return run


class Pooled(NamedTuple):
    """Random queries, a pool whose layers are larger than the L2 cache, and the table of its keys."""

    q: jax.Array
    k: jax.Array | Float8Rows
    v: jax.Array | Float8Rows
    table: PageTable

    @property
    def moved(self) -> int:
        """Bytes of a layer's keys and values that requests see."""
        _, _, kv_heads, _, head_dim = self.k.shape
        return moved_bytes(int(self.table.valid.sum()), kv_heads, head_dim, isinstance(self.k, Float8Rows))


def draw(
    heads: int,
    kv_heads: int,
    keys: int,
    *,
    queries: int = QUERIES,
    head_dim: int = HEAD_DIM,
    page_rows: int = 64,
    requests: int = 1,
    segments: Sequence[float] = (1.0,),
    dtype: DTypeLike = jnp.bfloat16,
    in_8_bits: bool = False,
) -> Pooled:
    """Operands of `split_attention`, with `keys` keys for each request in so many segments."""
    table, pages = make_table(keys, page_rows, segments, requests)
    layers = -(-POOL_BYTES // moved_bytes(requests * keys, kv_heads, head_dim, in_8_bits))
    shape = (layers, pages, kv_heads, page_rows, head_dim)
    shapes = [(requests, queries, heads, head_dim), shape, shape]
    q, k, v = (jax.random.normal(jax.random.key(i), s, dtype) for i, s in enumerate(shapes))
    if in_8_bits:
        k, v = map(jax.jit(Float8Rows.of), (k, v))
    return Pooled(q, k, v, table)


def moved_bytes(keys: int, kv_heads: int, head_dim: int, in_8_bits: bool = False) -> int:
    """Of keys and values, and of their scales where they have 8 bits."""
    return 2 * keys * kv_heads * (head_dim + 2 if in_8_bits else 2 * head_dim)


def compiled_form(
    form: Form, operands: Pooled, *, chained: bool = False
) -> tuple[Callable[[], list[AttentionOutput]], int]:
    """Calls of a form with layer after layer, compiled, and how many of them are one call's."""
    layers = operands.k.shape[0]
    repeats = math.ceil(LEAST_SECONDS / (layers * (operands.moved / BYTES_PER_SECOND + 1e-5)))
    executable = compiled(repeated(form, layers, repeats), *operands, chained=chained)
    return functools.partial(executable, *operands), layers * repeats


def errors(actual: AttentionOutput, expected: AttentionOutput) -> dict[str, float]:
    """Relative error of the output, and the largest difference of the log-sum-exp."""
    o, reference = (np.asarray(x.o, np.float64) for x in (actual, expected))
    lse, reference_lse = (np.asarray(x.m + jnp.log(x.l), np.float64) for x in (actual, expected))
    return {
        "error": float(np.linalg.norm(o - reference) / np.linalg.norm(reference)),
        "lse_error": float(np.abs(lse - reference_lse).max()),
    }


def measure(
    heads: int,
    kv_heads: int,
    keys: int,
    *,
    head_dim: int = HEAD_DIM,
    implementations: Sequence[str] = tuple(FORMS),
    tilings: Sequence[Tiles] = (),
    **sizes: Any,
) -> Iterator[dict[str, Any]]:
    """Rows of the table: contiguous and scattered keys, each form, and the kernel under each of `tilings`.

    Arguments:
    - `sizes`: queries, rows of a page, requests and the form of the pool, as of `draw`.
    """
    scale = head_dim**-0.5
    forms: list[tuple[dict[str, Any], Form]] = [
        (
            {"implementation": name},
            functools.partial(split_attention, **FORMS[name], scale=scale),
        )
        for name in implementations
    ]
    forms += [
        (
            {"implementation": "mosaic_gpu", **dataclasses.asdict(tiles)},
            functools.partial(split_attention_mosaic_gpu, tiles=tiles, scale=scale),
        )
        for tiles in tilings
    ]
    for segments in ((1.0,), SEGMENTS):
        operands = draw(heads, kv_heads, keys, head_dim=head_dim, segments=segments, **sizes)
        moved, last = operands.moved, operands.k.shape[0] - 1
        exact = functools.partial(split_attention, layer=last, scale=scale, implementation="reference")
        reference = compiled(exact, *operands)(*operands)
        for columns, form in forms:
            chained = columns["implementation"] == "chained"
            call, number = compiled_form(form, operands, chained=chained)
            seconds = median_seconds(call) / number
            yield {
                "kv_heads": kv_heads,
                "heads": heads,
                "keys": keys,
                "segments": len(segments),
                "requests": len(operands.q),
                "page_rows": operands.k.shape[3],
                **columns,
                "us": 1e6 * seconds,
                "tb_s": moved / seconds / 1e12,
                "share_of_copy": moved / seconds / BYTES_PER_SECOND,
                **errors(call()[-1], reference),
            }


def candidates(rows: int, in_8_bits: bool = False) -> list[Tiles]:
    """Cuts worth trying for `rows` folded rows, the default first."""
    default = default_tiles(rows, HEAD_DIM, in_8_bits)
    change = functools.partial(dataclasses.replace, default)
    if in_8_bits:
        cuts = [{"stages": 2, "stored_stages": default.stored_stages + 2}, {"min_tiles": 1}, {"min_tiles": 4}]
        if rows <= 64:
            cuts += [{"stages": 4, "stored_stages": 4}, {"key_groups": 2, "stages": 4, "stored_stages": 4}]
    elif rows <= 64:
        cuts = [{"stages": 5}, {"stages": 4}, {"key_groups": 2}, {"step_tiles": 2, "stages": 3}]
        cuts += [{"min_tiles": 4}, {"min_tiles": 8}]
    else:
        cuts = [{"step_tiles": 1, "stages": 6}, {"min_tiles": 1}, {"min_tiles": 4}, {"min_tiles": 8}]
        cuts += [{"stages": 2}, {"processors": 128}]
    return [default, *(change(**cut) for cut in cuts)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("split_attention", __doc__)
    parser.add_argument("--shapes", nargs="+", default=HEADS, help="query heads x key-value heads")
    parser.add_argument("--keys", type=int, nargs="+", default=KEYS)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--page-rows", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--implementations", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--fp8", action="store_true", help="a pool in 8 bits")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args(arguments)
    name = "split_attention_sweep" if args.sweep else "split_attention"
    for shape in args.shapes:
        heads, kv_heads = map(int, shape.split("x"))
        folded = padded_rows(args.queries) * heads // kv_heads
        rows = []
        for keys in args.keys:
            for row in measure(
                heads,
                kv_heads,
                keys,
                queries=args.queries,
                page_rows=args.page_rows,
                requests=args.requests,
                implementations=() if args.sweep else args.implementations,
                in_8_bits=args.fp8,
                tilings=candidates(folded, args.fp8) if args.sweep else (),
            ):
                print_row(row)
                rows.append(row)
        record(f"{name}_{shape}_fp8" if args.fp8 else f"{name}_{shape}", rows, args.out)
