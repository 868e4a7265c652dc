"""The contract that every attention form fulfils."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor

Queries = Float[Array, "rows heads head_dim"]
Keys = Float[Array, "keys kv_heads head_dim"]
Bounds = Int[Tensor, " rows"]


class AttentionOutput(NamedTuple):
    """Attention of some rows over some keys, in a form that partial results can be merged in.

    - `o`: the normalised output, in the dtype of the queries.
    - `m`: the largest score of each row and head, f32; -inf where the row sees no key.
    - `l`: the sum of exp(score - m), f32; 0 where the row sees no key (and `o` is 0).
    """

    o: Float[Array, "rows heads head_dim"]
    m: Float[Array, "rows heads"]
    l: Float[Array, "rows heads"]  # noqa: E741
