"""Sizes of Triton's kernels that suit a card: from those of the package to neighbours that are faster.

Run as `python3 -m benchmarks triton_sizes [--cases skinny_matmul split_attention-28x4-131072]
[--dtype float32]` on a card. A case starts at the sizes that the package has for the card. One of them at a
time is halved or doubled, and the fastest is the next start, until none is faster by a hundredth. An
operator's record has what ran, the fastest first. The tables of the package are in the modules
`jdllm.pallas.*.triton`.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from benchmarks.cases import case_parser
from benchmarks.operators import attention, grouped_matmul, masked_logits, skinny_matmul, split_attention
from benchmarks.record import median_seconds, print_row, record
from benchmarks.shapes import SHAPES
from jdllm.pallas.device import target
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.triton_launch import LEAST, ProductSizes, Schedule, Sizes

GAIN = 0.01
SHAPE = SHAPES["llada-8b"]

Dtype = Literal["bfloat16", "float32"]
SLOWER: dict[Dtype, int] = {"bfloat16": 1, "float32": 10}
"""What products take longer, roughly."""

AnySizes = Sizes | ProductSizes
Timer = Callable[[], float]


class Case(NamedTuple):
    """One table's row that is looked for.

    - `start`: the package's sizes.
    - `fields`: of the sizes, those that may change besides the schedule.
    - `build`: compiles the kernel with other sizes and returns what times it, in seconds. Raises where it
      does not fit the card.
    """

    start: Any
    fields: Sequence[str]
    build: Callable[[Any], Timer]


def neighbours(sizes: AnySizes, fields: Sequence[str]) -> Iterator[AnySizes]:
    """Sizes of which one number is half or double, with as many or with half or double the warps.

    And those of which the warps alone are, or which have one stage more or less.
    """
    warps, stages = sizes.schedule
    for field, (times, more) in itertools.product(fields, ((0.5, 1), (2, 1), (0.5, 0.5), (2, 2))):
        number = int(times * getattr(sizes, field))
        yield sizes._replace(**{field: number}, schedule=Schedule(int(more * warps), stages))
    for schedule in ((warps // 2, stages), (2 * warps, stages), (warps, stages - 1), (warps, stages + 1)):
        yield sizes._replace(schedule=Schedule(*schedule))


def is_possible(sizes: AnySizes) -> bool:
    """Whether the numbers are some that Triton takes; a card may still not hold them."""
    return min(sizes[:-1]) >= LEAST and 1 <= sizes.schedule.warps <= 16 and sizes.schedule.stages >= 1


def climb(case: Case, say: Callable[[AnySizes, float], None]) -> dict[AnySizes, float]:
    """What was tried, by sizes: seconds, infinite where a kernel cannot run.

    Arguments:
    - `say`: hears of each.
    """
    tried: dict[AnySizes, float] = {}

    def best() -> AnySizes:
        return min(tried, key=lambda sizes: tried[sizes])

    _try([case.start], case.build, tried, say)
    while True:
        now = best()
        new = (s for s in neighbours(now, case.fields) if is_possible(s) and s not in tried)
        _try(new, case.build, tried, say)
        if tried[best()] > (1 - GAIN) * tried[now]:
            return tried


def _try(
    candidates: Iterable[AnySizes],
    build: Callable[[Any], Timer],
    tried: dict[AnySizes, float],
    say: Callable[[AnySizes, float], None],
) -> None:
    """Compile side by side, then time one after the other."""
    candidates = list(candidates)
    with ThreadPoolExecutor() as pool:
        timers = list(pool.map(functools.partial(_unless_refused, build), candidates))
    for sizes, timer in zip(candidates, timers, strict=True):
        # What shared memory cannot hold is refused once it runs.
        seconds = None if timer is None else _unless_refused(lambda _, timer=timer: timer(), sizes)
        tried[sizes] = math.inf if seconds is None else seconds
        say(sizes, tried[sizes])


def _unless_refused[T](call: Callable[[Any], T], sizes: AnySizes) -> T | None:
    try:
        return call(sizes)
    except Exception as e:  # Triton's own errors have no type that is there without it.
        print(f"{sizes}: {str(e).partition(chr(10))[0][:120]}", flush=True)
        return None


def form_of(operator: str) -> Any:
    """The module of an operator's form. Triton is imported where it runs: tests interpret it elsewhere."""
    return importlib.import_module(f"jdllm.pallas.{operator}.triton")


def skinny_case(rows: int, dtype: Dtype) -> Case:
    """All products of a layer with so many rows."""
    products, of_triton = skinny_matmul.products_of(SHAPE).values(), form_of("skinny_matmul")
    operands = [(product, *skinny_matmul.draw(product, rows, dtype)) for product in products]

    def build(sizes: ProductSizes) -> Timer:
        calls = []
        for product, x, stacks in operands:
            kernel = functools.partial(of_triton.skinny_matmul_triton, gated=product.gated, sizes=sizes)
            form = lambda x, stacks, layer, own, kernel=kernel: kernel(x, stacks, layer=layer)  # noqa: E731
            calls.append(skinny_matmul.compiled_form(form, False, x, stacks, product))
        return lambda: sum(median_seconds(call) / number for call, number in calls)

    return Case(starting(of_triton, rows, dtype), ("columns", "depth"), build)


def head_case(rows: int, dtype: Dtype) -> Case:
    """Masked logits of so many rows, without noise."""
    of_triton, scale = form_of("masked_logits"), masked_logits.LOGIT_SPREAD / math.sqrt(SHAPE.hidden_size)
    shapes = (rows, SHAPE.hidden_size), (SHAPE.vocab_size, SHAPE.hidden_size)
    hidden, head = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes))
    head, asked = scale * head, masked_logits.sampling(rows, SHAPE.vocab_size, noise=False)

    def build(sizes: ProductSizes) -> Timer:
        form = functools.partial(of_triton.masked_logits_triton, level=Level.TOP, sizes=sizes)
        return masked_logits.compiled_form(form, hidden, head, asked, rows).seconds

    start = starting(of_triton, rows, dtype)
    return Case(start, ("columns", "depth", *["rows"] * (rows > start.rows)), build)


def grouped_case(rows: int, dtype: Dtype) -> Case:
    """Gated products of LLaDA-MoE's experts with so many rows, all groups together."""
    of_triton, operands = form_of("grouped_matmul"), grouped_matmul.draw("gated", rows, dtype)
    floor = SLOWER[dtype] * grouped_matmul.floor_seconds("gated", rows)

    def build(sizes: ProductSizes) -> Timer:
        form = functools.partial(of_triton.grouped_matmul_triton, sizes=sizes)
        call, number = grouped_matmul.compiled_form(form, operands, floor)
        return lambda: median_seconds(call) / number

    start = starting(of_triton, -(-rows // grouped_matmul.GROUPS), dtype)
    return Case(start, ("rows", "columns", "depth"), build)


def attention_case(heads: int, kv_heads: int, rows: int, dtype: Dtype) -> Case:
    """Packed attention of one segment with so many rows."""
    of_triton, operands = form_of("attention"), attention.draw([rows], heads, kv_heads, dtype)
    flops = SLOWER[dtype] * attention.attention_flops([rows], heads)

    def build(sizes: Sizes) -> Timer:
        form = functools.partial(of_triton.attention_triton, scale=attention.HEAD_DIM**-0.5, sizes=sizes)
        call, number = attention.compiled_form(lambda *rows: form(*rows).o, operands, flops)
        return lambda: median_seconds(call) / number

    return Case(starting(of_triton, attention.HEAD_DIM, dtype), ("rows", "keys"), build)


def split_case(heads: int, kv_heads: int, keys: int, dtype: Dtype) -> Case:
    """Attention of a block to so many keys of the pool, which lie together."""
    of_triton = form_of("split_attention")
    operands = split_attention.draw(heads, kv_heads, keys, dtype=dtype)

    def build(sizes: Sizes) -> Timer:
        scale = split_attention.HEAD_DIM**-0.5
        form = functools.partial(of_triton.split_attention_triton, scale=scale, sizes=sizes)
        call, number = split_attention.compiled_form(form, operands)
        return lambda: median_seconds(call) / number

    return Case(starting(of_triton, split_attention.HEAD_DIM, dtype), ("rows", "keys"), build)


def starting(of_triton: Any, size: int, dtype: Dtype) -> Any:
    """The package's sizes for this card."""
    return of_triton.sizes_for(size, jnp.dtype(dtype).itemsize, target().capability)


def _cases() -> Iterator[tuple[str, Callable[[Dtype], Case]]]:
    for rows in (16, 32, 64):
        yield f"skinny_matmul-{rows}", functools.partial(skinny_case, rows)
    for rows in (32, 64, 256, 512, 4096):
        yield f"masked_logits-{rows}", functools.partial(head_case, rows)
    for rows in (8192, 32768, 131072):
        yield f"grouped_matmul-{rows}", functools.partial(grouped_case, rows)
    for (heads, kv_heads), rows in itertools.product(((32, 32), (28, 4)), (1024, 4096, 16384)):
        yield f"attention-{heads}x{kv_heads}-{rows}", functools.partial(attention_case, heads, kv_heads, rows)
    for (heads, kv_heads), keys in itertools.product(((32, 32), (32, 8), (28, 4)), (4096, 65536, 131072)):
        yield (
            f"split_attention-{heads}x{kv_heads}-{keys}",
            functools.partial(split_case, heads, kv_heads, keys),
        )


CASES = dict(_cases())


def row_of(name: str, sizes: AnySizes, seconds: float) -> dict[str, Any]:
    """A row of the table."""
    numbers = sizes._asdict()
    schedule = numbers.pop("schedule")
    return {"case": name, **numbers, **schedule._asdict(), "us": 1e6 * seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("triton_sizes", __doc__)
    parser.add_argument("--cases", nargs="+", help="names, or how they begin", default=list(CASES))
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    args = parser.parse_args(arguments)
    wanted = [name for name in CASES if name.startswith(tuple(args.cases))]
    for operator, names in itertools.groupby(wanted, lambda name: name.partition("-")[0]):
        table: list[dict[str, Any]] = []
        for name in names:
            say = lambda sizes, s, name=name: print_row(row_of(name, sizes, s))  # noqa: E731
            tried = climb(CASES[name](args.dtype), say)
            ran = sorted((seconds, sizes) for sizes, seconds in tried.items() if seconds < math.inf)
            table += [row_of(name, sizes, seconds) for seconds, sizes in ran]
        suffix = "" if args.dtype == "bfloat16" else f"_{args.dtype}"
        record(f"triton_sizes_{operator}{suffix}", table, args.out)
