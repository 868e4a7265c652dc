"""Time of one denoising step of a block of fresh rows against cached keys and values, with random weights.

Run as `python3 -m benchmarks cached_step [--shape llada-8b] [--fresh 32] [--cached 4096] [--form chain layers
xla] [--quantization none int8] [--kv-cache-dtype fp8]` on a card: the layers as the chain of kernels that
they are by default, where they can be one, as kernels of which each waits for the one before, and so with
XLA's attention. Several steps run inside one executable, each on the tokens of the one before. `step_ms` is a
step's share of one that follows another, `waited_ms` of one whose tokens the host waits for, `sustained_ms`
of many that run for seconds, with the mean clock and power of the card meanwhile. The floor is the bytes of
the weights that a step reads (`weights_read`) and of the cache over the measured copy rate.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from benchmarks.cases import case_parser
from benchmarks.operators.masked_logits import sampling
from benchmarks.record import (
    Ceilings,
    compiled,
    measure_ceilings,
    median_seconds,
    record,
    sustained,
    waited_seconds,
)
from benchmarks.shapes import SHAPES
from jdllm.compiling.executables import temp_bytes
from jdllm.compiling.over_cards import everywhere
from jdllm.decoding.head_decision import head_decision
from jdllm.engine_options import QUANTIZATIONS
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.paged.forward import forward_reuse
from jdllm.execution.paged.pool import KvArrays, pool_shape
from jdllm.execution.transformer import final_norm
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.spread import pool_config, pool_sharding
from jdllm.models.weights import Params, abstract_params, head_weights, init_params
from jdllm.pallas.attention import AttentionOutput
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.split_attention import PageTable, dense_table, split_attention, with_fresh_rows
from jdllm.planning.step_time import weights_read
from jdllm.stored_rows import Float8Rows, KvCacheDtype

STEPS = 16

Form = Literal["chain", "layers", "xla"]
_ATTENTION: dict[Form, Callable[..., AttentionOutput] | None] = {
    "chain": None,
    "layers": split_attention,
    "xla": functools.partial(split_attention, implementation="xla"),
}

Pool = Float[Array, "layers pages kv_heads page_rows head_dim"] | Float8Rows


def denoise(
    params: Params,
    k_pool: Pool,
    v_pool: Pool,
    table: PageTable,
    tokens: Int[Array, " fresh"],
    cached: Int[Array, ""],
    *,
    config: ModelConfig,
    form: Form,
    steps: int,
) -> Int[Array, " fresh"]:
    """`steps` steps of one request, whose fresh rows follow `cached` rows; every row takes its new token.

    `table` lists the cached pages and then the fresh rows.
    """
    fresh = tokens.shape[0]
    unused = jnp.zeros(fresh, jnp.int32)
    rows = Rows(cached + jnp.arange(fresh), unused, unused)
    asked = sampling(fresh, config.vocab_size, noise=False)

    def step(_: int, tokens: Int[Array, " fresh"]) -> Int[Array, " fresh"]:
        pool = KvArrays(k_pool, v_pool)
        h = forward_reuse(params, config, tokens, rows, pool, table, attention=_ATTENTION[form])
        return head_decision(final_norm(params, config, h), head_weights(params), asked, Level.TOP).token

    return lax.fori_loop(0, steps, step, tokens)


def random_cache(
    config: ModelConfig, rows: int, fresh: int, page_rows: int, dtype: str
) -> tuple[Pool, Pool, PageTable]:
    """Keys and values of one request of `rows` cached rows, whose pages lie anywhere in the pool.

    The model says whether they are stored in 8 bits. The table has the `fresh` rows that ask, too.
    """
    pages = -(-rows // page_rows)
    shape = pool_shape(pool_config(config), pages, page_rows)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=pool_sharding(config))
    k_pool, v_pool = (draw(jax.random.key(i), shape, jnp.dtype(dtype)) for i in range(2))
    if config.kv_cache_dtype == "fp8":
        k_pool, v_pool = map(jax.jit(Float8Rows.of), (k_pool, v_pool))
    table = dense_table(np.array([rows], np.int32), pages, page_rows)
    order = np.random.default_rng(0).permutation(pages).astype(np.int32)
    table = with_fresh_rows(table._replace(pages=order), np.array([0]), np.array([fresh]), page_rows)
    return k_pool, v_pool, jax.tree.map(lambda x: everywhere(jnp.asarray(x), k_pool), table)


class Compiled(NamedTuple):
    """An executable of `STEPS` steps, and what it takes."""

    executable: jax.stages.Compiled
    inputs: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.executable(*self.inputs)


def compile_step(
    params: Params,
    config: ModelConfig,
    *,
    fresh: int,
    cached: int,
    page_rows: int = 64,
    form: Form = "chain",
) -> Compiled:
    """`STEPS` steps of `fresh` random tokens against `cached` random keys and values."""
    pools_and_table = random_cache(config, cached, fresh, page_rows, "bfloat16")
    tokens = jax.random.randint(jax.random.key(2), (fresh,), 0, config.defined_ids)
    inputs = params, *pools_and_table, everywhere(tokens, params), everywhere(jnp.int32(cached), params)
    static = {"config": config, "form": form, "steps": STEPS}
    return Compiled(compiled(denoise, *inputs, chained=form == "chain", **static), inputs)


def measure(
    params: Params, config: ModelConfig, args: argparse.Namespace, form: Form, ceilings: Ceilings
) -> dict[str, Any]:
    """One row of the table."""
    start = time.perf_counter()
    run = compile_step(
        params,
        config,
        fresh=args.fresh,
        cached=args.cached,
        page_rows=args.page_rows,
        form=form,
    )
    compile_seconds = time.perf_counter() - start
    seconds = median_seconds(run) / STEPS
    for_long = sustained(run)
    pool_bytes = sum(part.nbytes for part in jax.tree.leaves(run.inputs[1:3]))
    moved = weights_read(config, "bfloat16", args.fresh) + pool_bytes
    return {
        "shape": args.shape,
        "fresh": args.fresh,
        "cached": args.cached,
        "page_rows": args.page_rows,
        "form": form,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "step_ms": 1e3 * seconds,
        "waited_ms": 1e3 * waited_seconds(run) / STEPS,
        "sustained_ms": 1e3 * for_long.seconds / STEPS,
        "floor_ms": 1e3 * moved / ceilings.bytes,
        "share_of_floor": moved / ceilings.bytes / seconds,
        "temp_mib": temp_bytes(run.executable) / 2**20,
        "compile_s": compile_seconds,
        **for_long.state,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("cached_step", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--fresh", type=int, default=32)
    parser.add_argument("--cached", type=int, default=4096)
    parser.add_argument("--page-rows", type=int, default=64)
    parser.add_argument("--form", choices=get_args(Form), nargs="+")
    parser.add_argument("--quantization", choices=("none", *QUANTIZATIONS), nargs="+", default=["none"])
    parser.add_argument("--kv-cache-dtype", choices=get_args(KvCacheDtype), default="auto")
    args = parser.parse_args(arguments)
    config = dataclasses.replace(SHAPES[args.shape], kv_cache_dtype=args.kv_cache_dtype)
    chain = chains(abstract_params(config, "bfloat16"), config, args.fresh)
    forms: list[Form] = args.form or ["chain" if chain else "layers"]
    if "chain" in forms and not chain:
        parser.error(f"on this device {args.fresh} rows of {args.shape} make no chain; take layers or xla")
    ceilings = measure_ceilings()
    table = []
    for quantization in args.quantization:
        config = config.quantised(None if quantization == "none" else quantization)
        params = init_params(config, jax.random.key(0), "bfloat16")
        table += [measure(params, config, args, form, ceilings) for form in forms]
        del params
    quantised = "" if args.quantization == ["none"] else "_" + "-".join(args.quantization)
    keys = "" if args.kv_cache_dtype == "auto" else f"_{args.kv_cache_dtype}-keys"
    record(
        f"cached_step_{args.shape}{quantised}{keys}",
        table,
        args.out,
        steps=STEPS,
        ceiling_tb_s=ceilings.bytes / 1e12,
    )
