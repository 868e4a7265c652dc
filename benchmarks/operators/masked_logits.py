"""Time of masked logits against their floor and their portable form, with random data.

Run as `python3 -m benchmarks masked_logits [--shape llada-8b] [--rows 32 2048] [--noise]
[--level MOMENTS] [--implementations triton] [--sweep]` on a card. Every figure is the mean over repetitions
inside one executable, the median of five calls. The floor is the larger of bytes over 4.3 TB/s and flops over
700 TFLOP/s. `--noise` draws every row's token at temperature 1. `--sweep` tries the cuts of `candidates`.
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

from benchmarks.cases import case_parser
from benchmarks.record import BYTES_PER_SECOND, FLOPS_PER_SECOND, compiled, median_seconds, print_row, record
from benchmarks.shapes import SHAPES
from jdllm.compiling.executables import temp_bytes
from jdllm.noise import gumbel, vocabulary_bits
from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.masked_logits import Level, RowDecision, RowSampling, masked_logits
from jdllm.pallas.masked_logits.api import Implementation
from jdllm.pallas.masked_logits.limits import MAX_ROWS
from jdllm.pallas.masked_logits.mosaic_gpu import masked_logits_mosaic_gpu
from jdllm.pallas.masked_logits.tiles import Tiles, default_tiles

LOGIT_SPREAD = 3.0
# The two forms add products in different orders: what f32 sums of 4096 terms may differ by.
TOLERANCE = 1e-4

ROWS_OF_A_CALL = {2: 8192, 4: 1024}
"""By bytes of a number: products of float32 take many times as long."""

Form = Callable[[jax.Array, jax.Array, RowSampling], RowDecision]


def sampling(rows: int, vocab: int, noise: bool) -> RowSampling:
    """Rows without bans or filters."""
    words = jnp.arange(rows, dtype=jnp.uint32)
    bans = jnp.full((rows, 2), -1)
    return RowSampling(
        keys=(words, words + 1),
        positions=jnp.arange(rows),
        temperature=jnp.full(rows, float(noise)),
        tempered=jnp.zeros(rows, bool),
        top_k=jnp.full(rows, vocab),
        top_p=jnp.ones(rows),
        min_p=jnp.zeros(rows),
        top_k_first=jnp.zeros(rows, bool),
        limit=jnp.full(rows, vocab),
        token_bans=bans,
        confidence_bans=bans,
        listed=jnp.zeros(rows, bool),
    )


def in_chunks(form: Form, hidden: jax.Array, head: jax.Array, rows: RowSampling, size: int) -> RowDecision:
    """Rows beyond what one call may hold, a chunk after the other."""
    parts = [
        form(hidden[at : at + size], head, jax.tree.map(lambda x, at=at: x[at : at + size], rows))
        for at in range(0, len(hidden), size)
    ]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


class Repeated(NamedTuple):
    """A form that was compiled to run again and again.

    - `call`: the decisions.
    - `seconds`: measures the time of one repetition.
    - `temporaries`: bytes.
    """

    call: Callable[[], RowDecision]
    seconds: Callable[[], float]
    temporaries: int


def compiled_form(form: Form, hidden: jax.Array, head: jax.Array, rows: RowSampling, size: int) -> Repeated:
    """Repeat `form` inside one executable."""
    inner = max(4, ROWS_OF_A_CALL[hidden.dtype.itemsize] // len(hidden))

    def repeat(hidden: jax.Array, head: jax.Array, rows: RowSampling) -> RowDecision:
        def body(_: int, last: RowDecision) -> RowDecision:
            again, _ = lax.optimization_barrier((hidden, last))  # nothing moves out of the loop
            return in_chunks(form, again, head, rows, size)

        return lax.fori_loop(0, inner, body, in_chunks(form, hidden, head, rows, size))

    executable = compiled(repeat, hidden, head, rows)
    call = functools.partial(executable, hidden, head, rows)
    return Repeated(call, lambda: median_seconds(call) / (inner + 1), temp_bytes(executable))


def disagreement(
    ours: RowDecision, theirs: RowDecision, hidden: jax.Array, head: jax.Array, rows: RowSampling
) -> str:
    """What is wrong with `ours`, empty if nothing is; tokens may differ where their scores are equal."""
    problems = []
    for name in ("maximum", "total", "second", "negative_entropy"):
        a, b = (np.asarray(getattr(decision, name), np.float64) for decision in (ours, theirs))
        error = np.max(np.abs(a - b) / np.maximum(np.abs(b), 1))
        if not error < TOLERANCE:
            problems.append(f"{name} off by {error:.1e}")
    for row in np.flatnonzero(np.asarray(ours.token) != np.asarray(theirs.token)):
        ids = np.array([ours.token[row], theirs.token[row]])
        at = jax.tree.map(lambda x, row=row: x[row : row + 1], rows)
        noise = gumbel(vocabulary_bits(at.keys, at.positions, len(head)))[0, ids]
        pair = np.asarray(head[ids], np.float64) @ np.asarray(hidden[row], np.float64)
        pair += float(at.temperature[0]) * np.asarray(noise, np.float64)
        if not abs(pair[0] - pair[1]) < TOLERANCE:
            problems.append(f"row {row}: ids {ids} with scores {pair}")
    return "; ".join(problems[:4])


def floor_seconds(rows: int, depth: int, vocab: int, size: int) -> float:
    flops, moved = 2.0 * rows * depth * vocab, 2.0 * depth * (vocab * math.ceil(rows / size) + rows)
    return max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)


def candidates(rows: int) -> list[Tiles]:
    """Cuts worth trying for a chunk of `rows` rows, the default first."""
    if rows <= WARPGROUP_ROWS:
        others = ["256,1,1,1,1,5", "128,1,1,1,1,8", "96,1,1,1,1,8", "192,1,1,1,2,7"]
    elif rows <= 2 * WARPGROUP_ROWS:
        others = ["256,2,1,1,2,4", "256,2,1,1,1,4", "192,2,1,1,1,5", "128,2,1,1,2,7"]
    else:
        others = ["192,2,1,2,1,5", "256,2,1,1,2,4", "256,2,1,1,1,4", "256,2,1,2,1,4", "128,2,1,2,1,7"]
        others += ["240,2,1,1,1,4", "192,2,1,1,1,5"]
        # Clusters of four: not every group of processors is a multiple of them.
        others += ["256,2,1,2,2,4,128"] + ["256,2,1,4,1,4,128"] * (rows > 4 * WARPGROUP_ROWS)
    return list(dict.fromkeys([default_tiles(rows), *map(parse_tiles, others)]))


def cuts(tilings: Sequence[Tiles], level: Level) -> list[tuple[dict[str, Any], Form]]:
    """The kernel for Hopper with each of these cuts, and what tells them apart."""
    return [
        (dataclasses.asdict(tiles), functools.partial(masked_logits_mosaic_gpu, level=level, tiles=tiles))
        for tiles in tilings
    ]


def named(implementations: Sequence[Implementation], level: Level) -> list[tuple[dict[str, Any], Form]]:
    """Forms by name."""
    return [
        ({"implementation": name}, functools.partial(masked_logits, level=level, implementation=name))
        for name in implementations
    ]


def measure(
    forms: Sequence[tuple[dict[str, Any], Form]],
    hidden: jax.Array,
    head: jax.Array,
    level: Level,
    noise: bool,
) -> Iterator[dict[str, Any]]:
    """A row of the table for each form; the portable one is measured once."""
    (rows, depth), vocab = hidden.shape, head.shape[0]
    size = min(rows, MAX_ROWS[level])
    asked = sampling(rows, vocab, noise)
    portable = functools.partial(masked_logits, level=level, implementation="xla")
    xla = compiled_form(portable, hidden, head, asked, size)
    decision, xla_seconds = xla.call(), xla.seconds()
    floor = floor_seconds(rows, depth, vocab, size)
    for columns, form in forms:
        ours = compiled_form(form, hidden, head, asked, size)
        seconds = ours.seconds()
        yield {
            "rows": rows,
            "level": level.name,
            "noise": noise,
            **columns,
            "ms": 1e3 * seconds,
            "xla_ms": 1e3 * xla_seconds,
            "floor_ms": 1e3 * floor,
            "share_of_floor": floor / seconds,
            "tflops": 2e-12 * rows * depth * vocab / seconds,
            "temp_mib": ours.temporaries / 2**20,
            "xla_temp_mib": xla.temporaries / 2**20,
            "wrong": disagreement(ours.call(), decision, hidden, head, asked),
        }


def parse_tiles(text: str) -> Tiles:
    """`columns,row_groups,column_groups,row_blocks,column_blocks,stages[,processors]`."""
    return Tiles(*map(int, text.split(",")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("masked_logits", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256, 1024, 2048, 4096])
    parser.add_argument("--level", choices=[Level.TOP.name, Level.MOMENTS.name], default=Level.TOP.name)
    parser.add_argument("--noise", action="store_true", help="draw tokens at temperature 1")
    parser.add_argument("--tiles", type=parse_tiles, nargs="+", help=parse_tiles.__doc__)
    parser.add_argument("--implementations", nargs="+", choices=["mosaic_gpu", "triton"], help="by name")
    parser.add_argument("--sweep", action="store_true", help="all candidate cuts, fastest first")
    args = parser.parse_args(arguments)
    config, level = SHAPES[args.shape], Level[args.level]
    scale = LOGIT_SPREAD / math.sqrt(config.hidden_size)
    head = scale * jax.random.normal(jax.random.key(0), (config.vocab_size, config.hidden_size), jnp.bfloat16)
    table = []
    for rows in args.rows:
        hidden = jax.random.normal(jax.random.key(rows), (rows, config.hidden_size), jnp.bfloat16)
        chunk = min(rows, MAX_ROWS[level])
        tilings = args.tiles or (candidates(chunk) if args.sweep else [default_tiles(chunk)])
        measured = []
        forms = named(args.implementations, level) if args.implementations else cuts(tilings, level)
        for row in measure(forms, hidden, head, level, args.noise):
            print_row(row)
            measured.append(row)
        table += sorted(measured, key=lambda row: row["ms"])
    suffix = f"_{args.level.lower()}" + "_noise" * args.noise + "_sweep" * args.sweep
    suffix += "_forms" * bool(args.implementations)
    record(f"masked_logits_{args.shape}{suffix}", table, args.out)
    if any(row["wrong"] for row in table):
        raise SystemExit("results differ from those of the portable form")
