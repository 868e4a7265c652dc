"""A sum over cards, and the rows of all cards: the entry points and the choice of a form."""

from typing import Literal

from jaxtyping import Array, Float, Int32

from jdllm.pallas.device import target
from jdllm.pallas.exchange.limits import EXCHANGE, JOIN

Implementation = Literal["mosaic_gpu", "xla"]


def sum_over_cards(
    part: Float[Array, "rows d"],
    addresses: Int32[Array, "1 words"],
    axis_name: str,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "rows d"]:
    """The sum of what all cards have, inside `jax.shard_map`.

    All cards have to call it equally often and in the same order, as they run the same executables.

    Arguments:
    - `part`: of this card.
    - `addresses`: this card's row of `jdllm.pallas.exchange.addresses_of`.
    - `axis_name`: of the mesh, all of whose cards are added.
    - `implementation`: "mosaic_gpu" (for Hopper), one kernel that adds in f32 in the order of the cards and
      rounds once, or "xla", a collective; by default the first that can run and is not turned off.

    Returns the sum, in the dtype of `part`, the same bits on all cards. Raises `NotImplementedError` where
    the given implementation cannot run, naming its limit.
    """
    form = EXCHANGE.choose(target(), implementation, part, addresses.shape[1] // 2 - 1)
    return form(part, addresses, axis_name=axis_name)


def rows_of_all_cards(
    part: Float[Array, "rows d"],
    addresses: Int32[Array, "1 words"],
    axis_name: str,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "all_rows d"]:
    """The rows of all cards, those of the first card first, inside `jax.shard_map`.

    All cards have to call it equally often and in the same order, as they run the same executables.

    Arguments:
    - `part`: the rows of this card, of which each card has as many.
    - `addresses`: this card's row of `jdllm.pallas.exchange.addresses_of`.
    - `axis_name`: of the mesh, all of whose cards have rows.
    - `implementation`: "mosaic_gpu" (for Hopper), one kernel, or "xla", a collective; by default the first
      that can run and is not turned off.

    Returns the rows, the same on all cards. Raises `NotImplementedError` where the given implementation
    cannot run, naming its limit.
    """
    form = JOIN.choose(target(), implementation, part)
    return form(part, addresses, axis_name=axis_name)
