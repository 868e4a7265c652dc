"""Products of a few rows: the entry point and the choice of a form."""

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Array, Float

from jdllm.pallas.device import target
from jdllm.pallas.skinny_matmul.limits import SKINNY_MATMUL
from jdllm.pallas.skinny_matmul.types import Bias, Layer, Product, Rotation, Weight, X, head_dim_of

Implementation = Literal["mosaic_gpu", "triton", "xla"]

_MOST_WEIGHTS = 3


def skinny_matmul(
    x: X,
    weights: Sequence[Weight],
    *,
    layer: Layer = 0,
    gated: bool = False,
    bias: Bias | None = None,
    rotation: Rotation | None = None,
    chained: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Product, ...]:
    """Multiply a few rows with one layer's matrices, a matter of streaming these.

    Arguments:
    - `x`: the rows.
    - `weights`: one to three stacks, each with a matrix per layer whose rows make the outputs; all of them
      quantised, or none.
    - `layer`: which matrix of each stack; the stacks are never sliced, which would copy them.
    - `gated`: whether the result is one, silu(x gate) * (x up), of two stacks of one shape, first the gates.
    - `bias`: what is added to the products of each layer, one product after the other.
    - `rotation`: cosine and sine of each row, where the weights are those of queries, keys and values: all
      products but the last are rotated as `jdllm.layers.rotate` does, whole heads of twice the pairs.
    - `chained`: whether the kernel for Hopper is part of a chain (`jdllm.pallas.chain`): then all but the
      rows is older than it.
    - `implementation`: "mosaic_gpu" (for Hopper), "triton" (from Ampere on, by the extras cuda12 and cuda13)
      or "xla" (portable); by default the first that can run and is not turned off.

    Returns x @ w[layer].T for each stack `w`, or the gated product alone, in the dtype of `x`. Sums are f32;
    a gated product is one of products that were rounded to the dtype of `x`.

    Raises `ValueError` for shapes that do not fit together, and `NotImplementedError` where the given
    implementation cannot run, naming its limit.
    """
    _check_shapes(x, weights, gated)
    _check_added(weights, gated, bias)
    _check_rotation(x, weights, rotation)
    form = SKINNY_MATMUL.choose(target(), implementation, x, weights, head_dim_of(rotation))
    options = {"layer": layer, "gated": gated, "bias": bias, "rotation": rotation}
    return form(x, weights, **options, hints={"chained": chained})


def skinny_parts(
    x: X, weight: Weight, *, layer: Layer = 0, chained: bool = False
) -> Float[Array, "parts rows n"]:
    """A product whose sums are left in parts, for who reads it next to add them; for Hopper only.

    Arguments:
    - `x`: the rows.
    - `weight`: a stack with a matrix per layer whose rows make the outputs.
    - `layer`: which matrix of the stack.
    - `chained`: whether the kernel is part of a chain: then all but the rows is older than it.

    Returns parts that sum to x @ weight[layer].T: several in f32, or a single one in the dtype of `x`, as it
    suits the shapes. Raises `NotImplementedError` where the kernel cannot run, naming its limit.
    """
    _check_shapes(x, [weight], gated=False)
    SKINNY_MATMUL.choose(target(), "mosaic_gpu", x, [weight])
    # Pallas for GPUs takes a while to import: only where it runs.
    from jdllm.pallas.skinny_matmul.mosaic_gpu import skinny_parts_mosaic_gpu

    return skinny_parts_mosaic_gpu(x, weight, layer=layer, chained=chained)


def _check_shapes(x: X, weights: Sequence[Weight], gated: bool) -> None:
    if not 1 <= len(weights) <= _MOST_WEIGHTS:
        raise ValueError(f"products of a few rows take 1 to {_MOST_WEIGHTS} weights, not {len(weights)}")
    if gated and len(weights) != 2:
        raise ValueError(f"a gated product takes two weights, not {len(weights)}")
    shapes = {w.shape if gated else (w.shape[0], w.shape[2]) for w in weights}
    if len(shapes) > 1:
        what = "of one shape" if gated else "of as many layers and inputs"
        raise ValueError(f"products of a few rows take weights {what}, not {[w.shape for w in weights]}")
    if weights[0].shape[2] != x.shape[1]:
        raise ValueError(f"rows of {x.shape[1]} do not fit weights {weights[0].shape}")


def _check_added(weights: Sequence[Weight], gated: bool, bias: Bias | None) -> None:
    expected = weights[0].shape[0], sum(w.shape[1] for w in weights)
    if bias is not None and (gated or bias.shape != expected):
        what = "a gated product" if gated else f"products that take one of {expected}"
        raise ValueError(f"a bias of {bias.shape} does not fit {what}")


def _check_rotation(x: X, weights: Sequence[Weight], rotation: Rotation | None) -> None:
    for angles in rotation or ():
        outputs = [w.shape[1] for w in weights]
        if angles.shape[0] != x.shape[0] or any(n % (2 * angles.shape[1]) for n in outputs):
            raise ValueError(f"a rotation of {angles.shape} does not fit {x.shape[0]} rows of {outputs}")
