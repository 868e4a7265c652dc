"""The forms of a sum over cards and of joining rows, and what the kernel can take."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.dispatch import Form, Operator, check_one_dtype, forms_of
from jdllm.pallas.exchange.layout import MAX_ROWS

_PACKAGE = "jdllm.pallas.exchange"
_NUMBERS = 8  # that a thread moves at once


def check_mosaic_gpu(part: Float[Array, "rows d"] | jax.ShapeDtypeStruct, cards: int) -> None:
    """Raise `NotImplementedError`, naming the limit, where the kernel cannot add such parts of `cards`."""
    check_join(part)
    if cards > 2 and len(part) > MAX_ROWS:
        raise NotImplementedError(f"a sum of {cards} cards takes 1 to {MAX_ROWS} rows, not {len(part)}")


def check_join(part: Float[Array, "rows d"] | jax.ShapeDtypeStruct) -> None:
    """Raise `NotImplementedError`, naming the limit, where the kernel cannot join such parts."""
    check_one_dtype("the exchange takes bfloat16 or float16, not", (jnp.bfloat16, jnp.float16), part)
    rows, columns = part.shape
    if not rows:
        raise NotImplementedError("the exchange takes rows, and there are none")
    if columns % _NUMBERS or not columns:
        raise NotImplementedError(f"the exchange takes multiples of {_NUMBERS} columns, not {columns}")


EXCHANGE = Operator[None](
    "sum over cards",
    forms_of(
        _PACKAGE,
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu"),
        Form("xla"),
    ),
)
"""Checked by the part of a card, and the number of cards."""

JOIN = Operator[None](
    "rows of all cards",
    (
        Form("mosaic_gpu", check_join, "mosaic_gpu", implementation=f"{_PACKAGE}.mosaic_gpu:join_mosaic_gpu"),
        Form("xla", implementation=f"{_PACKAGE}.xla:join_xla"),
    ),
)
"""Checked by the part of a card."""
