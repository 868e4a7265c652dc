"""The Hopper kernel of addition and norm, in Pallas for Mosaic GPU: a block of one warpgroup for each row.

On several cards the block of a row exchanges what is added with the blocks of this row on the other cards.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int32

from jdllm.pallas.chain import ALONE, let_next_start, wait_for_kernel_before
from jdllm.pallas.exchange.row import sum_row_over_cards
from jdllm.pallas.ring import COMPILER_PARAMS
from jdllm.pallas.shared_lowering import lowered_once

_VECTOR = 4

Row = Float[Array, " d"]


@lowered_once("eps", "chained")
def add_norm_mosaic_gpu(
    h: Float[Array, "rows d"],
    parts: Float[Array, "parts rows d"],
    norms: Float[Array, "layers d"],
    layer: Int[Array, ""],
    addresses: Int32[Array, "1 words"] | None = None,
    *,
    eps: float,
    chained: bool,
) -> tuple[Float[Array, "rows d"], Float[Array, "rows d"]]:
    """Hopper form of `jdllm.pallas.add_norm.add_norm`."""
    rows, d = h.shape
    result = jax.ShapeDtypeStruct((rows, d), h.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, eps=eps, chained=chained),
        out_type=[result, result],
        scratch_types=[ALONE],
        grid=(rows,),
        grid_names=("row",),
        compiler_params=COMPILER_PARAMS,
        kernel_name="add_norm",
    )
    exchanged = () if addresses is None else (addresses,)
    return tuple(kernel(h, parts, norms, layer.reshape(1), *exchanged))


def _kernel(h_ref, parts, norms, layer, *others, eps: float, chained: bool) -> None:
    *addresses, sum_ref, normed_ref, _ = others
    let_next_start(chained)
    row, d = lax.axis_index("row"), h_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((d,), vec_size=_VECTOR)

    def load(ref: Any) -> Row:
        return plgpu.load(ref, layout=layout, optimized=False)

    weight = load(norms.at[layer[0]])
    wait_for_kernel_before(chained)
    h = load(h_ref.at[row])
    added = functools.reduce(jnp.add, [load(parts.at[part, row]) for part in range(parts.shape[0])])
    added = added.astype(h.dtype)
    for of_card in addresses:
        added = sum_row_over_cards(added, of_card, layout)
    total = h.astype(jnp.float32) + added.astype(jnp.float32)
    h = total.astype(h.dtype)
    sum_ref[row] = h
    h32 = h.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(h32 * h32) * (1 / d) + eps)
    normed_ref[row] = (h32 * scale).astype(h.dtype) * weight
