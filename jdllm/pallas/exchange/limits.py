"""The forms of a sum over cards, and what the kernel can take."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.dispatch import Form, Operator, check_one_dtype, forms_of
from jdllm.pallas.exchange.layout import MAX_ROWS

_NUMBERS = 8  # that a thread moves at once


def check_mosaic_gpu(part: Float[Array, "rows d"] | jax.ShapeDtypeStruct, cards: int) -> None:
    """Raise `NotImplementedError`, naming the limit, where the kernel cannot add such parts of `cards`."""
    check_one_dtype("the exchange adds bfloat16 or float16, not", (jnp.bfloat16, jnp.float16), part)
    rows, columns = part.shape
    if not rows or (cards > 2 and rows > MAX_ROWS):
        raise NotImplementedError(f"the exchange of {cards} cards takes 1 to {MAX_ROWS} rows, not {rows}")
    if columns % _NUMBERS or not columns:
        raise NotImplementedError(f"the exchange takes multiples of {_NUMBERS} columns, not {columns}")


EXCHANGE = Operator[None](
    "sum over cards",
    forms_of(
        "jdllm.pallas.exchange",
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu"),
        Form("xla"),
    ),
)
"""Checked by the part of a card, and the number of cards."""
