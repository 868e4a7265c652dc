"""Rounding of one matrix by GPTQ: an error in one column is made good by the columns that are rounded later.

A matrix W, which multiplies rows x, is rounded so that the sum of |W x - Q x|^2 over the rows stays small.
The rows enter through the sums H of x x^T alone. Scales are chosen first. Then columns are rounded one after
another, those of the largest inputs first: these cost most, and the most columns are left to make them good.
Source: Frantar et al. 2022, "GPTQ: accurate post-training quantization for generative pre-trained
transformers"; the order is that of the authors' repository (IST-DASLab/gptq, `act-order`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int8

from jdllm.quantised import WeightForm, rounded
from jdllm.rounding import FACTORS, GROUP

DAMPING = 0.1
"""Share of the mean of the diagonal of H that is added to the diagonal: H may be singular, and has noise."""

BLOCK = 128
"""Columns whose errors are taken off all columns behind at once."""

RANGES: dict[WeightForm, tuple[int, int]] = {"int8": (-127, 127), "int4": (-8, 7)}
"""The least and the largest number of each form that can be calibrated: forms of equal steps."""


class Feedback(NamedTuple):
    """What errors in each column cost.

    - `sizes`: of the inputs, root mean squares up to a common factor.
    - `order`: in which columns are rounded.
    - `taken`: ones on the diagonal and zeros below, in this order. Row j has, for a column k behind j, what
      the least squares take off column k for an error of 1 in column j.
    - `costs`: of a squared error in each column, in this order, when the columns behind have made good what
      they can.
    """

    sizes: Float32[Array, " inputs"]
    order: Int[Array, " inputs"]
    taken: Float32[Array, "inputs inputs"]
    costs: Float32[Array, " inputs"]


@jax.jit
def feedback(sums: Float32[Array, "inputs inputs"]) -> Feedback:
    """What errors in each column of a matrix cost.

    Arguments:
    - `sums`: of x x^T over the rows x that the matrix multiplies.
    """
    mean = jnp.trace(sums) / len(sums)
    damped = sums + jnp.where(mean > 0, DAMPING * mean, 1) * jnp.eye(len(sums))
    sizes = jnp.sqrt(jnp.diagonal(damped))
    order = jnp.argsort(-sizes)
    # Ordered sums = upper upper^T. Their inverse has the Cholesky factor of GPTQ, up to the size of the rows.
    backwards = order[::-1]
    upper = jnp.linalg.cholesky(damped[backwards[:, None], backwards])[::-1, ::-1]
    roots = jnp.diagonal(upper)
    taken = jax.scipy.linalg.solve_triangular(upper / roots, jnp.eye(len(sums)), unit_diagonal=True)
    return Feedback(sizes, order, taken, roots * roots)


@jax.jit
def following(
    matrix: Float[Array, "outputs inputs"], drift: Float32[Array, "inputs inputs"], inputs: Feedback
) -> Float32[Array, "outputs inputs"]:
    """The matrix whose products with rows x come closest to those of `matrix` with rows y: least squares.

    Arguments:
    - `matrix`: W.
    - `drift`: D, the sum of (y - x) x^T over the rows.
    - `inputs`: the `feedback` of the rows x.

    Returns W + W D H^-1, with the damped H of `feedback`. Source: Li et al. 2025, "GPTAQ: efficient
    finetuning-free quantization for asymmetric calibration".
    """
    exact = matrix.astype(jnp.float32)
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    # H^-1 = taken^T costs^-1 taken, in the order of the columns.
    moved = product(product(exact, drift)[:, inputs.order], inputs.taken.T) / inputs.costs
    return exact.at[:, inputs.order].add(product(moved, inputs.taken), unique_indices=True)


@functools.partial(jax.jit, static_argnames="form")
def compensated(
    matrix: Float[Array, "outputs inputs"], inputs: Feedback, form: WeightForm
) -> tuple[Int8[Array, "outputs inputs"], Float32[Array, "outputs *groups"]]:
    """A matrix in few bits, whose columns make the errors of the columns before them good.

    Arguments:
    - `matrix`: the weights.
    - `inputs`: the `feedback` of the inputs of the matrix.
    - `form`: of the result.

    Returns numbers and scales in the forms in which `rounded` ("int8") and `rounded_in_groups` ("int4")
    return them. All scales are those of the matrix as it was: so groups are of neighbouring inputs, whatever
    the order in which columns are rounded.
    """
    exact, count = matrix.astype(jnp.float32), matrix.shape[1]
    # In 8 bits all columns are one group.
    scales = rounded(matrix)[1][None] if form == "int8" else _best_scales(exact, inputs.sizes)
    groups = jnp.zeros_like(inputs.order) if form == "int8" else inputs.order // GROUP
    padding = -count % BLOCK
    columns = jnp.pad(exact[:, inputs.order], [(0, 0), (0, padding)]).T
    taken, groups = jnp.pad(inputs.taken, [(0, padding)] * 2), jnp.pad(groups, (0, padding))

    def round_block(columns: Array, first: Array) -> tuple[Array, Array]:
        own, behind, of = (lax.dynamic_slice_in_dim(x, first, BLOCK) for x in (columns, taken, groups))
        within = lax.dynamic_slice_in_dim(behind, first, BLOCK, axis=1)
        numbers, errors = _rounded_block(own, within, scales[of], RANGES[form])
        return columns - jnp.matmul(behind.T, errors, precision=lax.Precision.HIGHEST), numbers

    _, numbers = lax.scan(round_block, columns, jnp.arange(0, len(columns), BLOCK))
    ordered = numbers.reshape(columns.shape)[:count].T
    values = jnp.zeros_like(ordered).at[:, inputs.order].set(ordered, unique_indices=True)
    return values, scales[0] if form == "int8" else scales.T


def _best_scales(
    matrix: Float32[Array, "outputs inputs"], sizes: Float32[Array, " inputs"]
) -> Float32[Array, "groups outputs"]:
    """Of the scales that `rounded_in_groups` tries, for each group of a row the one with the least errors.

    A squared error counts by the size of its input, not by the square of the size: the largest inputs are
    rounded first, and the columns behind make good most of their errors.
    """
    padding = -len(sizes) % GROUP
    whole = jnp.pad(matrix, [(0, 0), (0, padding)]).T.reshape(-1, GROUP, len(matrix))
    weights = jnp.pad(sizes, (0, padding)).reshape(-1, GROUP, 1)
    least, most = whole.min(axis=1), whole.max(axis=1)
    furthest = jnp.where(most > -least, most, least)

    def compare(best: tuple[Array, Array], factor: Array) -> tuple[tuple[Array, Array], None]:
        scales = furthest * (factor / -8)
        numbers = jnp.clip(jnp.round(whole / jnp.where(scales == 0, 1, scales)[:, None]), *RANGES["int4"])
        cost = (jnp.square(whole - numbers * scales[:, None]) * weights).sum(axis=1)
        better = cost < best[0]
        return (jnp.where(better, cost, best[0]), jnp.where(better, scales, best[1])), None

    none = jnp.full(furthest.shape, jnp.inf, jnp.float32)
    return lax.scan(compare, (none, none), jnp.asarray(FACTORS, jnp.float32))[0][1]


def _rounded_block(
    columns: Float32[Array, "block outputs"],
    within: Float32[Array, "block block"],
    scales: Float32[Array, "block outputs"],
    limits: tuple[int, int],
) -> tuple[Int8[Array, "block outputs"], Float32[Array, "block outputs"]]:
    """The numbers of columns that are rounded one behind another, and their errors.

    Arguments:
    - `columns`: the weights as they are when the block is reached.
    - `within`: the feedback between these columns.
    - `scales`: of each weight.
    - `limits`: the least and the largest number.
    """

    def round_column(columns: Array, step: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        place, behind, scales = step
        exact = columns[place]
        number = jnp.clip(jnp.round(exact / jnp.where(scales == 0, 1, scales)), *limits)
        error = exact - number * scales
        return columns - behind[:, None] * error, (number.astype(jnp.int8), error)

    return lax.scan(round_column, columns, (jnp.arange(len(columns)), within, scales))[1]
