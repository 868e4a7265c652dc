"""Matrices as numbers of 4 bits, with scales, and perhaps offsets, for groups of neighbouring inputs."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

GROUP = 128
"""Inputs that share a scale in 4 bits. The last group of a row may have fewer."""

SHIFTED_GROUP = 32
"""Inputs that share a scale and an offset in a `Shifted` matrix."""

FACTORS = tuple(step / 20 for step in range(14, 24))
"""By which the largest number of a group is multiplied before it becomes -8, of which `rounded_in_groups`
takes the best: 0.7 to 1.15."""

SHARES = tuple(step / 20 for step in range(14, 21))
"""Of the range of a group that sixteen numbers span: `rounded_with_offsets` takes the best, 0.7 to 1."""

_PARTS = 512  # of a step, in which errors of 4 bits are counted: a group's sum fits 32 bits


def rounded_in_groups(
    matrix: Float[Array, "*stack outputs inputs"],
) -> tuple[Int8[Array, "*stack outputs inputs"], Float32[Array, "*stack outputs groups"]]:
    """Numbers of 4 bits, -8 to 7, whose inputs are in order, and the scales of each row's groups.

    They are rounded to nearest. The number of a group that is furthest from zero, times one of `FACTORS`,
    becomes -8: so a scale may be negative. The factor is the one with the least sum of squared errors, the
    smallest one of several. Errors are counted in whole parts of a step, so that the order of a sum does not
    matter, and the same matrix gives the same numbers in pieces of any size.
    """
    *stack, inputs = matrix.shape
    groups = -(-inputs // GROUP)
    whole = jnp.pad(matrix, [(0, 0)] * len(stack) + [(0, groups * GROUP - inputs)])
    whole = whole.reshape(*stack, groups, GROUP)
    least, most = _bounds(whole)
    furthest = jnp.where(most > -least, most, least)

    def grid(factor: Array) -> tuple[Array, Array]:
        return furthest * (factor / -8), jnp.zeros_like(furthest)

    values, scales, _ = _with_least_errors(whole, grid, FACTORS)
    return values.reshape(*stack, groups * GROUP)[..., :inputs], scales


def rounded_with_offsets(
    matrix: Float[Array, "*stack outputs inputs"],
) -> tuple[
    Int8[Array, "*stack outputs inputs"],
    Float32[Array, "*stack outputs groups"],
    Float32[Array, "*stack outputs groups"],
]:
    """Numbers of 4 bits, -8 to 7, whose inputs, a multiple of 32, are in order, and the scales and offsets of
    each row's groups.

    The sixteen numbers of a group span one of `SHARES` of the range of the group, about its middle. Zero is
    part of each range, so that no offset is much larger than a step. Scales and offsets are rounded to 16
    bits (bfloat16) before numbers are rounded to nearest. The share is chosen as `rounded_in_groups` chooses
    a factor.
    """
    *stack, inputs = matrix.shape
    whole = matrix.reshape(*stack, inputs // SHIFTED_GROUP, SHIFTED_GROUP)
    least, most = (f(bound, 0) for f, bound in zip((jnp.minimum, jnp.maximum), _bounds(whole), strict=True))

    def grid(share: Array) -> tuple[Array, Array]:
        # Not a cast there and back, which XLA may leave out.
        scales = lax.reduce_precision((most - least) * (share / 15), 8, 7)
        return scales, lax.reduce_precision((least + most + scales) / 2, 8, 7)

    values, scales, offsets = _with_least_errors(whole, grid, SHARES)
    return values.reshape(matrix.shape), scales, offsets


def _bounds(groups: Array) -> tuple[Array, Array]:
    """The least and the largest number of each group."""
    least, most = (f(groups, axis=-1).astype(jnp.float32) for f in (jnp.min, jnp.max))
    return least, most


def _with_least_errors(
    groups: Float[Array, "*some group"],
    grid: Callable[[Array], tuple[Array, Array]],
    factors: Sequence[float],
) -> tuple[Int8[Array, "*some group"], Float32[Array, " *some"], Float32[Array, " *some"]]:
    """Numbers, scales and offsets by the factor with the least sum of squared errors in each group.

    Arguments:
    - `grid`: the scales and offsets of all groups by a factor, to which scales are proportional.
    - `factors`: of equally good ones the first is taken.
    """

    def steps(factor: Array) -> tuple[Array, Array, Array, Array]:
        """All numbers in steps, rounded and not, and the scales and offsets."""
        scales, offsets = grid(factor)
        exact = (groups.astype(jnp.float32) - offsets[..., None]) / jnp.where(scales == 0, 1, scales)[
            ..., None
        ]
        return jnp.clip(jnp.round(exact), -8, 7), exact, scales, offsets

    def compare(best: tuple[Array, Array], factor: Array) -> tuple[tuple[Array, Array], None]:
        nearest, exact, *_ = steps(factor)
        parts = jnp.round((exact - nearest) * _PARTS).astype(jnp.int32)
        cost = jnp.sum(parts * parts, axis=-1).astype(jnp.float32) * (factor * factor)
        better = cost < best[0]
        return (jnp.where(better, cost, best[0]), jnp.where(better, factor, best[1])), None

    none = jnp.full(groups.shape[:-1], jnp.inf, jnp.float32)
    (_, chosen), _ = lax.scan(compare, (none, none), jnp.asarray(factors, jnp.float32))
    values, _, scales, offsets = steps(chosen)
    return values.astype(jnp.int8), scales, offsets
