"""Matrices in few bits whose numbers and scales are drawn, so that no rounding is part of them."""

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.quantised import FLOAT8, GROUP, KINDS, SHIFTED_GROUP, Quantised, WeightForm, paired

OF_EXPERTS: list[WeightForm] = [form for form in KINDS if form != "uint4"]
"""Forms that kernels for experts take."""


def drawn_matrices(form: WeightForm, shape: tuple[int, ...], seed: int) -> tuple[Quantised, np.ndarray]:
    """Matrices, and what they stand for, exactly.

    Numbers are whole ones from -8 to 7, or beyond these up to 127 in int8. Each row has another scale, or
    each group of a row, which in uint4 has an offset, too. Scales have few bits: sums of some hundred
    products with small whole numbers are exact in f32. In 16 bits a number of 4 bits times its scale is
    exact, also with its offset.

    Arguments:
    - `shape`: `[..., outputs, inputs]`.
    """
    if form == "uint4":
        return _drawn_with_offsets(shape, seed)
    rng, most = np.random.default_rng(seed), 128 if form == "int8" else 8
    *rows, inputs = shape
    values = rng.integers(-most, most, shape)
    scales = 2.0 ** rng.integers(-9, -6, (*rows, -(-inputs // GROUP))) * rng.integers(1, 4, (*rows, 1))
    if form != "int4":
        scales = scales[..., :1]
    exact = values * np.repeat(scales, GROUP if form == "int4" else inputs, axis=-1)[..., :inputs]
    stored, given = jnp.asarray(values, jnp.int8), jnp.asarray(scales, jnp.float32)
    if form == "int4":
        return KINDS[form].of_stored(paired(stored), given), exact
    stored = stored.astype(FLOAT8 if form == "fp8" else jnp.int8)
    return KINDS[form].of_stored(stored, given[..., 0]), exact


def _drawn_with_offsets(shape: tuple[int, ...], seed: int) -> tuple[Quantised, np.ndarray]:
    rng = np.random.default_rng(seed)
    *rows, inputs = shape
    groups = *rows, inputs // SHIFTED_GROUP
    values, step = rng.integers(-8, 8, shape), 2.0 ** rng.integers(-9, -6, groups)
    scales, offsets = step * rng.integers(1, 4, groups), step * rng.integers(-50, 51, groups)
    stored = (jnp.asarray(part, jnp.bfloat16) for part in (scales, offsets))
    matrix = KINDS["uint4"].of_stored(paired(jnp.asarray(values, jnp.int8)), *stored)
    scales, offsets = (np.repeat(x, SHIFTED_GROUP, axis=-1) for x in (scales, offsets))
    return matrix, values * scales + offsets


def of_one_layer(stack: Quantised, layer: int) -> Quantised:
    """A stack of matrices in which no scale, offset or float of another layer is a number."""

    def lose(part: jax.Array) -> jax.Array:
        if not jnp.issubdtype(part.dtype, jnp.floating):
            return part
        own = (jnp.arange(len(part)) == layer).reshape(-1, *[1] * (part.ndim - 1))
        return jnp.where(own, part, jnp.asarray(jnp.nan, part.dtype))

    return jax.tree.map(lose, stack)


def shape_of(form: WeightForm, shape: tuple[int, ...]) -> Quantised:
    """Matrices `[..., outputs, inputs]` that are abstract."""
    return jax.eval_shape(KINDS[form].of, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
