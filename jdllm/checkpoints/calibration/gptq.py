"""Rounding of one matrix by GPTQ: an error in one column is made good by the columns behind it.

A matrix W, which multiplies rows x, is rounded so that the sum of |W x - Q x|^2 over the rows stays small.
The rows enter through the sums H of x x^T alone. Columns are rounded from left to right. Source: Frantar et
al. 2022, "GPTQ: accurate post-training quantization for generative pre-trained transformers".
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from jdllm.quantised import FACTORS, GROUP, WeightForm, rounded

DAMPING = 0.05
"""Share of the mean of the diagonal of H that is added to the diagonal: H may be singular, and has noise."""

RANGES: dict[WeightForm, tuple[int, int]] = {"int8": (-127, 127), "int4": (-8, 7)}
"""The least and the largest number of each form that can be calibrated: forms of equal steps."""


class Feedback(NamedTuple):
    """What an error in each column costs.

    - `taken`: ones on the diagonal and zeros below. Row j has, for a column k behind j, what the least
      squares take off column k for an error of 1 in column j.
    - `costs`: by how much a squared error in each column counts, when the columns behind have made good what
      they can.
    """

    taken: Float32[Array, "inputs inputs"]
    costs: Float32[Array, " inputs"]


@jax.jit
def feedback(sums: Float32[Array, "inputs inputs"]) -> Feedback:
    """What an error in each column of a matrix costs.

    Arguments:
    - `sums`: of x x^T over the rows x that the matrix multiplies.
    """
    mean = jnp.trace(sums) / len(sums)
    damped = sums + jnp.where(mean > 0, DAMPING * mean, 1) * jnp.eye(len(sums))
    # damped = upper upper^T. Its inverse has the Cholesky factor of GPTQ, up to the size of the rows.
    upper = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    sizes = jnp.diagonal(upper)
    taken = jax.scipy.linalg.solve_triangular(upper / sizes, jnp.eye(len(sums)), unit_diagonal=True)
    return Feedback(taken, sizes * sizes)


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
    return them. The scale of a group of 4 bits is chosen from its weights as they are when the group is
    reached, the scale of a row of 8 bits is that of the row as it was.
    """
    padding = -matrix.shape[1] % GROUP
    columns = jnp.pad(matrix.astype(jnp.float32), [(0, 0), (0, padding)]).T
    taken, costs = jnp.pad(inputs.taken, [(0, padding)] * 2), jnp.pad(inputs.costs, (0, padding))
    of_rows = rounded(matrix)[1] if form == "int8" else None

    def round_group(columns: Array, first: Array) -> tuple[Array, tuple[Array, Array]]:
        own = lax.dynamic_slice_in_dim(columns, first, GROUP)
        behind = lax.dynamic_slice_in_dim(taken, first, GROUP)
        scales = of_rows
        if scales is None:
            scales = _best_scales(own, lax.dynamic_slice_in_dim(costs, first, GROUP))
        within = lax.dynamic_slice_in_dim(behind, first, GROUP, axis=1)
        numbers, errors = _rounded_group(own, within, scales, RANGES[form])
        columns -= jnp.matmul(behind.T, errors, precision=lax.Precision.HIGHEST)
        return columns, (numbers, scales)

    _, (numbers, scales) = lax.scan(round_group, columns, jnp.arange(0, len(columns), GROUP))
    values = numbers.reshape(columns.shape)[: matrix.shape[1]].T
    return values, scales.T if of_rows is None else of_rows


def _best_scales(
    columns: Float32[Array, "group outputs"], costs: Float32[Array, " group"]
) -> Float32[Array, " outputs"]:
    """Of the scales that `rounded_in_groups` tries, for each output the one with the least costs."""
    least, most = columns.min(axis=0), columns.max(axis=0)
    furthest = jnp.where(most > -least, most, least)
    scales = furthest * (jnp.asarray(FACTORS, jnp.float32)[:, None] / -8)
    numbers = jnp.clip(jnp.round(columns / jnp.where(scales == 0, 1, scales)[:, None]), *RANGES["int4"])
    errors = jnp.square(columns - numbers * scales[:, None])
    best = jnp.argmin((errors * costs[:, None]).sum(axis=1), axis=0)
    return jnp.take_along_axis(scales, best[None], axis=0)[0]


def _rounded_group(
    columns: Float32[Array, "group outputs"],
    within: Float32[Array, "group group"],
    scales: Float32[Array, " outputs"],
    limits: tuple[int, int],
) -> tuple[Int8[Array, "group outputs"], Float32[Array, "group outputs"]]:
    """The numbers of neighbouring columns, and their errors.

    Arguments:
    - `columns`: the weights as they are when the group is reached.
    - `within`: the feedback between these columns.
    - `scales`: of each output.
    - `limits`: the least and the largest number.
    """
    steps = jnp.where(scales == 0, 1, scales)

    def round_column(columns: Array, step: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        place, behind = step
        exact = columns[place]
        number = jnp.clip(jnp.round(exact / steps), *limits)
        error = exact - number * scales
        return columns - behind[:, None] * error, (number.astype(jnp.int8), error)

    return lax.scan(round_column, columns, (jnp.arange(len(columns)), within))[1]
