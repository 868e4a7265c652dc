"""What each packed row is."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor

Hidden = Float[Array, "rows hidden"]
RowInts = Int[Tensor, " rows"]


class Rows(NamedTuple):
    """What each packed row is, beside its token.

    - `positions`: absolute position in its sequence, for the rotary embedding.
    - `k_start`, `k_end`: the range of rows whose keys it sees; empty for padding.
    """

    positions: RowInts
    k_start: RowInts
    k_end: RowInts
