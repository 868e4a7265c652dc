"""Time of packed attention at the models' shapes beside cuDNN's, tokamax's and the portable form.

Run as `python3 -m benchmarks attention [--rows 1024 4096] [--heads 32x32 28x4] [--forms mosaic_gpu]
[--out DIR]` on a card. One segment holds all rows; 4096 rows are measured in five segments too. Every figure
is the mean over whole calls, with what prepares the ranges, inside one executable with random data, and the
median of repetitions at the clock that the card keeps up under its power limit: `sm_mhz` and `watts` are read
right after them while it still runs. `ratio` is cuDNN's time over that of the form, `error` is against f32.
tokamax needs the extra `bench`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from benchmarks.cases import case_parser
from benchmarks.peers.tokamax_operators import attention_tokamax
from benchmarks.record import FLOPS_PER_SECOND, compiled, median_seconds, print_row, record, sustained
from benchmarks.shapes import SHAPES
from jdllm.pallas.attention import attention

LAUNCH_SECONDS = 1e-5
CALL_SECONDS = 0.03
"""Of an executable at that rate: what starts it does not count."""

LEAST_SECONDS = 0.3
"""Of work before anything is timed, and of work that is timed."""

ROWS = (1024, 4096, 16384, 32768)
HEADS = tuple(dict.fromkeys((c.num_heads, c.num_kv_heads) for c in SHAPES.values()))
HEAD_DIM = 128
PACKED = (1500, 300, 1024, 7, 1265)
FORMS = ("mosaic_gpu", "cudnn", "tokamax", "xla")
PEERS = ("cudnn", "tokamax")
XLA_ROWS = 4096
"""The portable form is measured with so many rows at most: it takes many times as long."""

CHECKED_ROWS = 1024
"""The reference holds all scores."""

Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
Form = Callable[..., jax.Array]


def draw(lengths: Sequence[int], heads: int, kv_heads: int, dtype: DTypeLike = jnp.bfloat16) -> Operands:
    """Normal queries, keys and values of segments of these lengths, and the ranges of keys."""
    rows = sum(lengths)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (rows, h, HEAD_DIM), dtype)
        for i, h in enumerate((heads, kv_heads, kv_heads))
    )
    ends = np.cumsum(lengths, dtype=np.int32)
    start, end = (
        jnp.asarray(np.repeat(bounds, lengths)) for bounds in (ends - np.asarray(lengths, np.int32), ends)
    )
    return q, k, v, start, end


def attend(
    form: str, q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, end: jax.Array
) -> jax.Array:
    """The output by one of `FORMS`, or by "reference"; "cudnn" takes all rows for one segment."""
    scale = q.shape[-1] ** -0.5
    if form == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn")
    if form == "tokamax":
        return attention_tokamax(q, k, v, start, end, scale=scale).o
    return attention(q, k, v, start, end, scale=scale, implementation=cast(Any, form)).o


def attention_flops(lengths: Sequence[int], heads: int) -> float:
    """Of both products."""
    return 4.0 * sum(length**2 for length in lengths) * heads * HEAD_DIM


def compiled_form(form: Form, operands: Operands, flops: float) -> tuple[Callable[[], jax.Array], int]:
    """Calls of a form inside one executable, compiled, and how many of them are one call's."""
    inner = math.ceil(CALL_SECONDS / (flops / FLOPS_PER_SECOND + LAUNCH_SECONDS))

    def repeat(q: jax.Array, *others: jax.Array) -> jax.Array:
        def body(_: int, last: jax.Array) -> jax.Array:
            again, _ = lax.optimization_barrier((q, last))  # nothing moves out of the loop
            return form(again, *others)

        return lax.fori_loop(0, inner, body, jnp.zeros_like(q))

    return functools.partial(compiled(repeat, *operands), *operands), inner


def time_form(form: str, operands: Operands, flops: float) -> tuple[float, dict[str, float]]:
    """Seconds of one call, and the card's state."""
    run, inner = compiled_form(functools.partial(attend, form), operands, flops)
    calls = math.ceil(LEAST_SECONDS / median_seconds(run, repeats=1, warm_up=1))
    seconds = median_seconds(run, repeats=max(5, calls), warm_up=calls)
    return seconds / inner, sustained(run).state


def relative_error(form: str, operands: Operands) -> float:
    """Against the reference in f32 of the highest precision, in the norm."""
    q, k, v, start, end = operands
    out = np.asarray(jax.jit(functools.partial(attend, form))(*operands), np.float64)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    exact = np.asarray(jax.jit(functools.partial(attend, "reference"))(*wide, start, end), np.float64)
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


def can_measure(form: str, lengths: Sequence[int]) -> bool:
    """Whether a form takes these segments, and takes them in reasonable time."""
    return (form != "cudnn" or len(lengths) == 1) and (form != "xla" or sum(lengths) <= XLA_ROWS)


def measure(
    rows: Sequence[int] = ROWS,
    heads: Sequence[tuple[int, int]] = HEADS,
    forms: Sequence[str] = FORMS,
) -> list[dict[str, Any]]:
    """A row of the table for each kind of heads, segments and form.

    Arguments:
    - `rows`: of one segment; with 4096 among them, the five segments of `PACKED` too.
    - `heads`: query heads and key-value heads.
    - `forms`: of `FORMS`. "cudnn" takes one segment only, "xla" is measured up to 4096 rows. A peer that
      fails has no row, and its reason is printed.
    """
    packed = [PACKED] if sum(PACKED) in rows else []
    table = []
    for query_heads, kv_heads in heads:
        for lengths in [*((count,) for count in rows), *packed]:
            shape = {
                "rows": sum(lengths),
                "heads": query_heads,
                "kv_heads": kv_heads,
                "segments": len(lengths),
            }
            operands = draw(lengths, query_heads, kv_heads)
            for form in forms:
                if can_measure(form, lengths):
                    row = _measured(form, operands, attention_flops(lengths, query_heads), shape)
                    table += [] if row is None else [row]
    return with_ratios(table)


def _measured(form: str, operands: Operands, flops: float, shape: dict[str, int]) -> dict[str, Any] | None:
    try:
        seconds, state = time_form(form, operands, flops)
    except RuntimeError as e:
        if form not in PEERS:
            raise
        print(f"{form}: no row for {shape}: {str(e).partition(chr(10))[0]}", flush=True)
        return None
    row = {**shape, "form": form, "ms": 1e3 * seconds, "tflops": 1e-12 * flops / seconds, **state}
    if shape["rows"] <= CHECKED_ROWS:
        row["error"] = relative_error(form, operands)
    print_row(row)
    return row


def with_ratios(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`table` with cuDNN's time at the same shape over each row's, where it was measured."""

    def shape(row: dict[str, Any]) -> tuple[int, ...]:
        return tuple(row[key] for key in ("rows", "heads", "kv_heads", "segments"))

    cudnn = {shape(row): row["ms"] for row in table if row["form"] == "cudnn"}
    return [row | ({"ratio": cudnn[shape(row)] / row["ms"]} if shape(row) in cudnn else {}) for row in table]


def parse_heads(text: str) -> tuple[int, int]:
    """Query heads `x` key-value heads."""
    heads, kv_heads = map(int, text.split("x"))
    return heads, kv_heads


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("attention", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--heads", type=parse_heads, nargs="+", default=HEADS, help=parse_heads.__doc__)
    parser.add_argument("--forms", choices=(*FORMS, "triton"), nargs="+", default=FORMS)
    args = parser.parse_args(arguments)
    suffix = "" if tuple(args.forms) == FORMS else "_" + "-".join(args.forms)
    record(f"attention{suffix}", measure(args.rows, args.heads, args.forms), args.out)
