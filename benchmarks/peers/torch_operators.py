"""Single operators in torch, timed by replays of CUDA graphs with random data: peers of our kernels."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.peers.torch_model import BACKENDS, Tensor, graph_seconds, reason

HEADS, HEAD_DIM = 32, 128
HIDDEN, FFN, VOCAB = 4096, 12288, 126464
QUERIES = 32
PREFILL_ROWS = (4096, 16384, 32768)
DECODE_KEYS = (4096, 16384, 65536, 131072)
HEAD_ROWS = (32, 256, 1024, 4096)
PRODUCTS = ((HIDDEN, HIDDEN), (HIDDEN, FFN), (FFN, HIDDEN))
PRODUCT_ROWS = (32, 1024, 4096, 16384)

# Calls in a graph, for those that are as short as launching one.
CALLS = 8

Row = dict[str, Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def copies(size: int) -> int:
    """How many operands of `size` bytes, used in turn, find nothing of themselves in the L2 cache."""
    return max(1, math.ceil(4 * torch.cuda.get_device_properties(0).L2_cache_size / size))


def several(calls: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """At least `CALLS` calls, each of `calls` as often as any other."""
    return calls * math.ceil(CALLS / len(calls))


def attempted(row: Row, calls: list[Callable[[], Any]]) -> Row | None:
    """`row` with the milliseconds of one of `calls`; nothing, with a printed line, where torch refuses."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    try:
        with torch.no_grad():
            return {**row, "ms": 1e3 * graph_seconds(calls)}
    except RuntimeError as e:
        print(f"torch: no row for {row}: {reason(e)}", flush=True)
        return None


def attention_of(backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Bidirectional attention of `[batch, heads, rows, head_dim]` by "cudnn", "flash" or "flex"."""
    if backend == "flex":
        return torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def prefill_attention() -> Iterator[Row]:
    """All rows of one sequence attend all of them; TFLOP/s count both products."""
    for rows in PREFILL_ROWS:
        for backend in (*BACKENDS, "flex"):
            q, k, v = (normal(1, rows, HEADS, HEAD_DIM).transpose(1, 2) for _ in range(3))
            call = functools.partial(attention_of(backend), q, k, v)
            row = attempted({"operator": "prefill attention", "backend": backend, "rows": rows}, [call])
            if row:
                yield row | {"tflops": 4e-9 * rows**2 * HEADS * HEAD_DIM / row["ms"]}


def decode_attention(shapes: Sequence[Sequence[int]]) -> Iterator[Row]:
    """A block of queries attends cached keys; the query heads of a group are rows of their key-value head."""
    for (heads, kv_heads), keys in itertools.product(shapes, DECODE_KEYS):
        moved = 2 * 2 * keys * kv_heads * HEAD_DIM
        operands = [
            (
                normal(1, kv_heads, QUERIES * heads // kv_heads, HEAD_DIM),
                *(normal(1, kv_heads, keys, HEAD_DIM) for _ in range(2)),
            )
            for _ in range(copies(moved))
        ]
        for backend in (*BACKENDS, "flex"):
            attend = attention_of(backend)
            calls = several([functools.partial(attend, *each) for each in operands])
            asked = {"operator": "decode attention", "backend": backend, "rows": QUERIES}
            row = attempted(asked | {"keys": keys, "heads": heads, "kv_heads": kv_heads}, calls)
            if row:
                yield row | {"tb_s": 1e-9 * moved / row["ms"]}


def choose(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Best token of each row, and the logarithm of its probability."""
    logits = F.linear(hidden, head)
    maximum, token = logits.max(dim=-1)
    return token, maximum.float() - logits.float().logsumexp(dim=-1)


def language_head() -> Iterator[Row]:
    """Product with the output matrix, argmax and log-sum-exp."""
    head = normal(VOCAB, HIDDEN).mul_(1 / math.sqrt(HIDDEN))
    for rows in HEAD_ROWS:
        hidden = normal(rows, HIDDEN)
        for backend in ("eager", "compiled"):
            form = choose if backend == "eager" else torch.compile(choose, dynamic=False)
            call = functools.partial(form, hidden, head)
            row = attempted({"operator": "head", "backend": backend, "rows": rows}, several([call]))
            if row:
                yield row | {
                    "tflops": 2e-9 * rows * HIDDEN * VOCAB / row["ms"],
                    "tb_s": 1e-9 * head.nbytes / row["ms"],
                }


def dense_products() -> Iterator[Row]:
    """Products of rows with matrices `[outputs, inputs]`, which come from device memory each time."""
    for inputs, outputs in PRODUCTS:
        for rows in PRODUCT_ROWS:
            x = normal(rows, inputs)
            matrices = [normal(outputs, inputs) for _ in range(copies(2 * inputs * outputs))]
            calls = several([functools.partial(F.linear, x, matrix) for matrix in matrices])
            row = attempted(
                {"operator": f"product {inputs} to {outputs}", "backend": "cublas", "rows": rows},
                calls,
            )
            if row:
                yield row | {
                    "tflops": 2e-9 * rows * inputs * outputs / row["ms"],
                    "tb_s": 2e-9 * inputs * outputs / row["ms"],
                }


def operators(shapes: Sequence[Sequence[int]]) -> dict[str, Callable[[], Iterator[Row]]]:
    """What is measured, by its name; `shapes` are query and key-value heads of cached attention."""
    return {
        "prefill": prefill_attention,
        "decode": functools.partial(decode_attention, shapes),
        "head": language_head,
        "products": dense_products,
    }
