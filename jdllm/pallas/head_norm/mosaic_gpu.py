"""The Hopper kernel of norms of heads, in Pallas for Mosaic GPU: a block of one warpgroup for each row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.pallas.chain import ALONE, let_next_start, wait_for_kernel_before
from jdllm.pallas.ring import COMPILER_PARAMS
from jdllm.pallas.shared_lowering import lowered_once

_WARPS, _LANES = 4, 32

Half = Float[Array, "heads pairs"]


@lowered_once("eps", "chained")
def head_norm_mosaic_gpu(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    norms: tuple[Float[Array, "layers head_dim"], Float[Array, "layers head_dim"]],
    layer: Int[Array, ""],
    rotation: tuple[Float[Array, "rows pairs"], Float[Array, "rows pairs"]],
    *,
    eps: float,
    chained: bool,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows kv_heads head_dim"]]:
    """Hopper form of `jdllm.pallas.head_norm.head_norm`."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, eps=eps, chained=chained),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)],
        scratch_types=[ALONE],
        grid=(q.shape[0],),
        grid_names=("row",),
        compiler_params=COMPILER_PARAMS,
        kernel_name="head_norm",
    )
    return tuple(kernel(q, k, *norms, layer.reshape(1), *rotation))


def _kernel(
    q, k, q_norms, k_norms, layer, cos_ref, sin_ref, q_out, k_out, _, *, eps: float, chained: bool
) -> None:
    let_next_start(chained)
    row, pairs = lax.axis_index("row"), cos_ref.shape[1]
    halves = pl.ds(0, pairs), pl.ds(pairs, pairs)
    # Each warp has every fourth head, and each lane the same dimensions of both halves: pairs meet in it.
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((_WARPS, pairs), (pairs // _LANES,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )

    def of_all_heads(ref: Any) -> Float[Array, " pairs"]:
        return plgpu.load(ref, layout=layout.reduce(0), optimized=False)

    cos, sin = (of_all_heads(x.at[row]) for x in (cos_ref, sin_ref))
    weights = [[of_all_heads(x.at[layer[0], half]) for half in halves] for x in (q_norms, k_norms)]
    wait_for_kernel_before(chained)
    for x, weight, out in zip((q, k), weights, (q_out, k_out), strict=True):
        heads = x.shape[1]

        def across(values: Float[Array, " pairs"], heads: int = heads) -> Half:
            return plgpu.layout_cast(lax.broadcast_in_dim(values, (heads, pairs), [1]), layout)

        def down(values: Float[Array, " heads"], heads: int = heads) -> Half:
            return plgpu.layout_cast(lax.broadcast_in_dim(values, (heads, pairs), [0]), layout)

        loaded = [plgpu.load(x.at[row, :, half], layout=layout, optimized=False) for half in halves]
        wide = [half.astype(jnp.float32) for half in loaded]
        squares = jnp.sum(wide[0] * wide[0] + wide[1] * wide[1], axis=1)
        scale = down(lax.rsqrt(squares * (0.5 / pairs) + eps))
        normed = [
            ((half * scale).astype(x.dtype) * across(own)).astype(jnp.float32)
            for half, own in zip(wide, weight, strict=True)
        ]
        a, b = normed
        out[row, :, halves[0]] = (a * across(cos) - b * across(sin)).astype(x.dtype)
        out[row, :, halves[1]] = (b * across(cos) + a * across(sin)).astype(x.dtype)
