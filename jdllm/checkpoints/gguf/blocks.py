"""Blocks of 4 bits in GGUF files as numbers with a scale and an offset for each 32 inputs.

A block of Q4_0 is 32 inputs with a scale d: q stands for (q - 8) d. One of Q4_1 has a minimum m, too: q
stands for q d + m. A block of Q4_K is eight groups of 32 inputs, whose scales s and minimums m are numbers of
6 bits, times d and n: q stands for q d s - n m. Source: `dequantize_row_q4_0`, `_q4_1` and `_q4_K` of ggml.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jdllm.checkpoints.index import Numbers, StoredTensor
from jdllm.checkpoints.quantised.packed import (
    Decode,
    PackedTensor,
    Parts,
    in_equal_groups,
    numbers,
    rows_of,
)
from jdllm.quantised import SHIFTED_GROUP

WIDER = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
"""Types that files of 4 bits have of some matrices, and that no form of the device has."""


class _Kind(NamedTuple):
    """How blocks of a type are laid out.

    - `bytes`, `head`: of a block, and of what is before its numbers.
    - `neighbours`: so many bytes have the numbers of as many neighbours in their lower halves, and those of
      the next ones in their upper halves.
    - `scales`: returns the scales and offsets of the groups of some blocks, side by side.
    """

    bytes: int
    head: int
    neighbours: int
    scales: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def kept_of_blocks(
    kind: str, stored: StoredTensor, inputs: int, arranged: Callable[[Decode], Decode]
) -> tuple[Numbers, ...]:
    """What a device keeps of a matrix.

    Arguments:
    - `kind`: the name of its type.
    - `stored`: the bytes of its rows.
    - `inputs`: of a row.
    - `arranged`: makes what decodes rows in their order of what decodes them in that of the file.

    Returns nothing for a type that is not of 4 bits, or whose numbers are no equal steps.
    """
    if kind not in _KINDS:
        return ()
    parts, shape = {"rows": stored}, (stored.shape[0], inputs // 2)
    values, scales, offsets = (
        arranged(functools.partial(decode, kind=_KINDS[kind])) for decode in (_pairs, _scales, _offsets)
    )
    groups = in_equal_groups(inputs, inputs // SHIFTED_GROUP)
    return numbers("uint4", PackedTensor.of(parts, "U8", shape, values), parts, scales, groups, offsets)


def _blocks(parts: Parts, rows: range, kind: _Kind) -> np.ndarray:
    return rows_of(parts["rows"], rows).reshape(len(rows), -1, kind.bytes)


def _pairs(parts: Parts, rows: range, *, kind: _Kind) -> np.ndarray:
    packed = _blocks(parts, rows, kind)[..., kind.head :].reshape(len(rows), -1, kind.neighbours)
    q = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(rows), -1)
    return q[:, ::2] | (q[:, 1::2] << 4)


def _scales(parts: Parts, rows: range, *, kind: _Kind) -> np.ndarray:
    return kind.scales(_blocks(parts, rows, kind))[0].reshape(len(rows), -1)


def _offsets(parts: Parts, rows: range, *, kind: _Kind) -> np.ndarray:
    return kind.scales(_blocks(parts, rows, kind))[1].reshape(len(rows), -1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """A float of 16 bits in each block, as one of 32."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _of_q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = _half(blocks, 0)
    return scales, np.zeros_like(scales)


def _of_q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = _half(blocks, 0)
    return scales, 8 * scales + _half(blocks, 2)


def _of_q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1) * _half(blocks, 0)
    least = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1) * _half(blocks, 2)
    return scales, 8 * scales - least


_KINDS = {
    "Q4_0": _Kind(18, 2, 16, _of_q4_0),
    "Q4_1": _Kind(20, 4, 16, _of_q4_1),
    "Q4_K": _Kind(144, 16, 32, _of_q4_k),
}
