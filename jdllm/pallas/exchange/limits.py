"""The forms of a sum over cards, and what the kernel can take."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.dispatch import Form, Operator, check_one_dtype, forms_of
from jdllm.pallas.exchange.layout import MAX_ROWS, SLOT_BYTES

_NUMBERS = 8  # that a thread moves at once


def check_mosaic_gpu(part: Float[Array, "rows d"] | jax.ShapeDtypeStruct) -> None:
    """Raise `NotImplementedError`, naming the limit, where the kernel cannot take such a part."""
    check_one_dtype("the exchange adds bfloat16 or float16, not", (jnp.bfloat16, jnp.float16), part)
    rows, columns = part.shape
    if not 1 <= rows <= MAX_ROWS:
        raise NotImplementedError(f"the exchange takes 1 to {MAX_ROWS} rows, not {rows}")
    if columns % _NUMBERS or not columns:
        raise NotImplementedError(f"the exchange takes multiples of {_NUMBERS} columns, not {columns}")
    size = rows * columns * part.dtype.itemsize
    if size > SLOT_BYTES:
        raise NotImplementedError(f"the exchange takes parts of {SLOT_BYTES} bytes at most, not of {size}")


EXCHANGE = Operator[None](
    "sum over cards",
    forms_of(
        "jdllm.pallas.exchange",
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu"),
        Form("xla"),
    ),
)
"""Checked by the part of a card."""
