"""What the devices of a process hold of a leaf of the parameter tree while the leaf is loaded."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from jdllm.checkpoints.index import StoredTensor
from jdllm.models.weights import TensorSpec


@dataclasses.dataclass
class Shard:
    """What one device holds of a leaf: the elements from `start` on.

    Where the leaf's sources are transposed, the device transposes; all places are in the source's order.
    """

    start: tuple[int, ...]
    buffer: jax.Array
    transposed: bool

    def part_of(self, place: tuple[int, ...]) -> list[range]:
        """What it has of the source tensor at a place of the leaf, along each axis of the tensor."""
        shape, start = (self._source_order(axes) for axes in (self.buffer.shape, self.start))
        own = [range(low, low + size) for low, size in zip(start, shape, strict=True)]
        here = all(index in axis for index, axis in zip(place, own, strict=False))
        return own[len(place) :] if here else [range(0)] * (len(own) - len(place))

    def take(self, block: np.ndarray, origin: tuple[int, ...]) -> None:
        """Write those elements that are in a block whose first element is at `origin`."""
        shape, start = (self._source_order(axes) for axes in (self.buffer.shape, self.start))
        bounds = zip(origin, block.shape, start, shape, strict=True)
        overlap = [(max(o, s), min(o + n, s + m)) for o, n, s, m in bounds]
        if all(low < high for low, high in overlap):
            cut = tuple(slice(low - o, high - o) for (low, high), o in zip(overlap, origin, strict=True))
            place = self._source_order([low - s for (low, _), s in zip(overlap, start, strict=True)])
            self.buffer = _write(
                self.buffer, block[cut], np.array(place, np.int32), transposed=self.transposed
            )

    def _source_order(self, axes: Sequence[int]) -> list[int]:
        """Values of all axes from the leaf's order to the source's, or back."""
        return [*axes[:-2], axes[-1], axes[-2]] if self.transposed else [*axes]


def allocate(spec: TensorSpec, dtype: str, sharding: Sharding | None) -> list[Shard]:
    """What each device of this process holds of a leaf, still zero.

    Arguments:
    - `spec`: the leaf.
    - `dtype`: of its elements.
    - `sharding`: `None` where the default device holds all of the leaf.
    """
    shape = spec.shape
    if sharding is None:
        return [Shard((0,) * len(shape), jnp.zeros(shape, dtype), spec.transposed)]
    local = sharding.shard_shape(shape)
    return [
        Shard(
            tuple(part.start or 0 for part in parts), jnp.zeros(local, dtype, device=device), spec.transposed
        )
        for device, parts in sharding.addressable_devices_indices_map(shape).items()
        if parts is not None
    ]


@functools.partial(jax.jit, donate_argnums=0, static_argnames="transposed")
def _write(leaf: jax.Array, piece: jax.Array, start: jax.Array, *, transposed: bool) -> jax.Array:
    piece = piece.astype(leaf.dtype)
    return lax.dynamic_update_slice(leaf, piece.mT if transposed else piece, list(start))


def needed(stored: StoredTensor, shards: Sequence[Shard], place: tuple[int, ...]) -> list[range]:
    """The part of a source tensor that holds what all shards have of this tensor.

    Arguments:
    - `stored`: the source tensor.
    - `shards`: of its leaf.
    - `place`: of the source tensor in the leaf.

    Returns a range along each axis: some rows, perhaps some columns, and all of further axes. The ranges are
    empty where no shard has anything of the tensor.
    """
    parts = [part for part in (shard.part_of(place) for shard in shards) if all(part)]
    if not parts:
        return [range(0)] * len(stored.shape)
    spans = (
        range(min(r.start for r in axis), max(r.stop for r in axis)) for axis in zip(*parts, strict=True)
    )
    return [*itertools.islice(spans, 2), *stored.whole[2:]]
