"""The NumPy arguments of an executable as one array: to the device in one transfer instead of dozens.

A transfer takes tens of microseconds, however few bytes it moves.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jaxtyping import Array, Int

LARGEST = 1 << 14
"""Elements of the largest leaf that is merged: merged leaves are on the device twice, and for a large one the
transfer is what takes the time."""

_ALIGNED = 64
"""Words, 256 bytes: XLA hands a part to a kernel where it lies, and Mosaic refuses other addresses."""

_HOST = (np.ndarray, np.generic)
_BOOL = np.dtype(np.bool_)
_MERGED = frozenset(map(np.dtype, (np.int32, np.uint32, np.float32, np.bool_)))


class MergedLeaf(NamedTuple):
    """A merged leaf. It has a word for each element: its bits, or whether it is true."""

    shape: tuple[int, ...]
    dtype: np.dtype


def on_host(leaf: Any) -> bool:
    """Whether a leaf is a NumPy array or scalar; others are on the device, or abstract."""
    return isinstance(leaf, _HOST)


@dataclasses.dataclass(frozen=True)
class HostArguments:
    """How the leaves of an executable's arguments are passed to it.

    - `parts`: for each leaf how it is merged, `None` where it is passed as it is.
    """

    parts: tuple[MergedLeaf | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> "HostArguments":
        """For leaves like these; leaves of other types than int32, uint32, f32 and bool are not merged."""

        def part(leaf: Any) -> MergedLeaf | None:
            merged = on_host(leaf) and leaf.dtype in _MERGED and leaf.size <= LARGEST
            return MergedLeaf(leaf.shape, leaf.dtype) if merged else None

        return cls(tuple(map(part, leaves)))

    def merge(self, leaves: Sequence[Any]) -> tuple[Int[np.ndarray, " words"], list[Any]]:
        """The words of the merged leaves one after another, padded to `_ALIGNED` each, and the other leaves.

        Raises `TypeError` where a merged leaf has another shape or type.
        """
        words = []
        for leaf, part in zip(leaves, self.parts, strict=True):
            if part is None:
                continue
            if leaf.shape != part.shape or leaf.dtype != part.dtype:
                raise TypeError(f"compiled for {part}, called with {MergedLeaf(leaf.shape, leaf.dtype)}")
            words += _words(leaf).tobytes(), bytes(4 * (-leaf.size % _ALIGNED))
        return np.frombuffer(b"".join(words), np.int32), self.others(leaves)

    def others(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that are not merged."""
        return [leaf for leaf, part in zip(leaves, self.parts, strict=True) if part is None]

    def split(self, words: Int[Array, " words"], others: Sequence[Array]) -> list[Array]:
        """The leaves, traced, of what `merge` returned."""
        leaves, start, rest = [], 0, iter(others)
        for part in self.parts:
            if part is None:
                leaves.append(next(rest))
            else:
                size = math.prod(part.shape)
                leaves.append(_values(words[start : start + size], part.dtype).reshape(part.shape))
                start += size + -size % _ALIGNED
        return leaves


def _words(leaf: Any) -> Any:
    return leaf.astype(np.int32) if leaf.dtype == _BOOL else leaf


def _values(words: Int[Array, " words"], dtype: np.dtype) -> Array:
    return words != 0 if dtype == _BOOL else lax.bitcast_convert_type(words, dtype)
