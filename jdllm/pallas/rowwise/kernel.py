"""The Hopper kernels of single rows, in Pallas for Mosaic GPU: a block of one warpgroup for each row.

They take next to no time, so what counts is what they wait for: everything that is older than their chain is
loaded before they wait.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.pallas.chain import let_next_start, wait_for_kernel_before
from jdllm.pallas.hopper import SHARED_BYTES
from jdllm.pallas.rowwise.limits import LANES, WARPS

_VECTOR = 4
_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)

# Unused: with more than half of the shared memory each block has a processor for itself. Blocks that start
# early find room on few processors only, those that the kernel before leaves idle, and would crowd there.
_ALONE = plgpu.SMEM((SHARED_BYTES // 2 + 4096,), jnp.int8)

Row = Float[Array, " d"]


def add_norm_rows(
    h: Float[Array, "rows d"],
    parts: Float[Array, "parts rows d"],
    norms: Float[Array, "layers d"],
    layer: Int[Array, ""],
    *,
    eps: float,
    chained: bool,
) -> tuple[Float[Array, "rows d"], Float[Array, "rows d"]]:
    """Hopper form of `jdllm.pallas.rowwise.add_norm`."""
    rows, d = h.shape
    result = jax.ShapeDtypeStruct((rows, d), h.dtype)
    kernel = plgpu.kernel(
        functools.partial(_add_norm, eps=eps, chained=chained),
        out_type=[result, result],
        scratch_types=[_ALONE],
        grid=(rows,),
        grid_names=("row",),
        compiler_params=_PARAMS,
        kernel_name="add_norm",
    )
    return tuple(kernel(h, parts, norms, layer.reshape(1)))


def _add_norm(h_ref, parts, norms, layer, sum_ref, normed_ref, _, *, eps: float, chained: bool) -> None:
    let_next_start(chained)
    row, d = lax.axis_index("row"), h_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((d,), vec_size=_VECTOR)

    def load(ref: Any) -> Row:
        return plgpu.load(ref, layout=layout, optimized=False)

    weight = load(norms.at[layer[0]])
    wait_for_kernel_before(chained)
    h = load(h_ref.at[row])
    added = functools.reduce(jnp.add, [load(parts.at[part, row]) for part in range(parts.shape[0])])
    total = h.astype(jnp.float32) + added.astype(h.dtype).astype(jnp.float32)
    h = total.astype(h.dtype)
    sum_ref[row] = h
    h32 = h.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(h32 * h32) * (1 / d) + eps)
    normed_ref[row] = (h32 * scale).astype(h.dtype) * weight


def rotated_rows(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    cos: Float[Array, "rows pairs"],
    sin: Float[Array, "rows pairs"],
    *,
    chained: bool,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows kv_heads head_dim"]]:
    """Hopper form of `jdllm.pallas.rowwise.rotate_rows`."""
    kernel = plgpu.kernel(
        functools.partial(_rotate, chained=chained),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)],
        scratch_types=[_ALONE],
        grid=(q.shape[0], 2),
        grid_names=("row", "operand"),
        compiler_params=_PARAMS,
        kernel_name="rotate",
    )
    return tuple(kernel(q, k, cos, sin))


def _rotate(q, k, cos_ref, sin_ref, q_out, k_out, _, *, chained: bool) -> None:
    let_next_start(chained)
    row, pairs = lax.axis_index("row"), cos_ref.shape[1]
    # A warp has a head, each lane some neighbouring pairs of it.
    tiling = plgpu.Tiling(((WARPS, pairs), (pairs // LANES,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    angles = [plgpu.load(x.at[row], layout=layout.reduce(0), optimized=False) for x in (cos_ref, sin_ref)]
    wait_for_kernel_before(chained)

    def turn(source: Any, to: Any) -> None:
        heads, parts = source.shape[1], [pl.ds(0, pairs), pl.ds(pairs, pairs)]
        cos, sin = (plgpu.layout_cast(lax.broadcast_in_dim(x, (heads, pairs), [1]), layout) for x in angles)
        a, b = (plgpu.load(source.at[row, :, part], layout=layout, optimized=False) for part in parts)
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        to[row, :, parts[0]] = (a * cos - b * sin).astype(to.dtype)
        to[row, :, parts[1]] = (b * cos + a * sin).astype(to.dtype)

    for operand, (source, to) in enumerate(((q, q_out), (k, k_out))):
        pl.when(lax.axis_index("operand") == operand)(functools.partial(turn, source, to))
