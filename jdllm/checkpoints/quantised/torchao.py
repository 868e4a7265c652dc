"""Weights as torchao stores them: matrices in parts, of which the metadata of the files tell.

A value of 8 bits is (q - zero) * scale, rounded as the library rounds it. A value of packed integers of 4
bits is q * scale + zero in float32, rounded to the type of the scale: the library has a product of such
matrices, and no values.
"""

import functools
import json

import numpy as np

from jdllm.checkpoints.index import DTYPES, READABLE, Index, Numbers, StoredTensor, read_metadata
from jdllm.checkpoints.quantised.packed import (
    PackedTensor,
    Parts,
    all_of,
    in_equal_groups,
    numbers,
    rows_of,
    unread,
)
from jdllm.errors import CheckpointError
from jdllm.models.quantization import Quantization

_PACKED = "Int4Tensor"
_VALUES = {"Int8Tensor": "I8", "IntxUnpackedToInt8Tensor": "I8", "Float8Tensor": "F8_E4M3", _PACKED: "I8"}
"""The kinds of matrices that are read, and the types of what is stored of their values."""
_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}


def dequantised(index: Index, quantization: Quantization) -> Index:
    """The tensors of a checkpoint with a matrix for each quantised one.

    Arguments:
    - `index`: what is stored.
    - `quantization`: of its `config.json`.

    Raises `CheckpointError` for a matrix of a kind that is not read, and for parts that do not fit.
    """
    del quantization  # the metadata tell
    found, matrices, told = dict(index), dict[str, dict[str, StoredTensor]](), dict[str, str]()
    for file in {stored.file for stored in index.values()}:
        told |= read_metadata(file)
    for name in index:
        module, _, part = name.rpartition("._weight_")
        if module:
            matrices.setdefault(f"{module}.weight", {})[part] = found.pop(name)
    return found | {name: _matrix(name, told.get(name, ""), parts) for name, parts in matrices.items()}


def _matrix(name: str, told: str, parts: Parts) -> PackedTensor:
    """A matrix of these parts, of which the metadata tell in JSON."""
    kind, dtype, narrow = _kind(told)
    if kind not in _VALUES:
        of = f"is an {kind}" if kind else "has parts of a matrix"
        raise CheckpointError(
            f"{name} {of} of torchao, which jdllm does not read: expected {', '.join(_VALUES)}"
        )
    values, scale, zero = (parts.get(part) for part in ("qdata", "scale", "zero_point"))
    if values is None or scale is None or values.dtype != _VALUES[kind] or len(values.shape) != 2:
        raise unread(name, parts)
    if kind == _PACKED:
        dtype, shape, decode = scale.dtype, (values.shape[0], 2 * values.shape[1]), _packed
        blocks, fits = scale.shape[::-1], zero is not None and scale.shape[1:] == shape[:1]
    else:
        shape, decode = values.shape, functools.partial(_plain, dtype=dtype)
        blocks, fits = scale.shape, True
    fits = (
        fits and len(blocks) == 2 and all(n and size % n == 0 for size, n in zip(shape, blocks, strict=True))
    )
    fits = fits and (zero is None or (zero.shape == scale.shape and zero.dtype in READABLE))
    if not fits or parts.keys() - {"qdata", "scale", "zero_point"} or {dtype, scale.dtype} - {*DTYPES}:
        raise unread(name, parts)
    return PackedTensor.of(parts, dtype, shape, decode, _kept(kind, narrow, parts, shape))


def _kind(told: str) -> tuple[str, str, str]:
    """The class of a matrix, the type of its values, and a narrower type that has its integers; "" for what
    the metadata do not tell."""
    try:
        values = json.loads(told)
        kind, data = str(values["_type"]), values["_data"]
        types = [data.get(name, {}).get("_data") for name in ("dtype", "target_dtype")]
        return kind, _NAMES.get(types[0], ""), str(types[1] or "")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return "", "", ""


def _kept(kind: str, narrow: str, parts: Parts, shape: tuple[int, ...]) -> tuple[Numbers, ...]:
    """What a device keeps of a matrix of integers. In 8 bits it has no zeros."""
    values, zero, (rows, inputs) = parts["qdata"], parts.get("zero_point"), shape
    if values.dtype != "I8":
        return ()
    shifted = zero is not None and bool(all_of(zero).astype(np.float32).any())
    if kind == _PACKED:
        decode, scales, offsets = _moved, _scales_of_packed, _offsets_of_packed
    else:
        decode, scales, offsets = _paired, _scales, _offsets
    groups = in_equal_groups(inputs, parts["scale"].shape[0 if kind == _PACKED else 1])
    if kind != _PACKED and (narrow != "int4" or inputs % 2):
        return () if shifted else numbers("int8", values, parts, scales, groups)
    in_pairs = PackedTensor.of(parts, "U8", (rows, inputs // 2), decode)
    found = () if shifted else numbers("int4", in_pairs, parts, scales, groups)
    return found + numbers("uint4", in_pairs, parts, scales, groups, offsets if shifted else None)


def _moved(parts: Parts, rows: range) -> np.ndarray:
    """Pairs of integers of 4 bits, each plus 8."""
    return rows_of(parts["qdata"], rows).view(np.uint8) ^ 0x88


def _paired(parts: Parts, rows: range) -> np.ndarray:
    """The same of integers that have a byte each."""
    codes = (rows_of(parts["qdata"], rows) + 8).view(np.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _scales(parts: Parts, rows: range) -> np.ndarray:
    return _of_rows(parts, "scale", rows)


def _offsets(parts: Parts, rows: range) -> np.ndarray:
    """What the number 0 stands for."""
    zeros = _of_rows(parts, "zero_point", rows).astype(np.float32)
    return _scales(parts, rows).astype(np.float32) * -zeros


def _of_rows(parts: Parts, name: str, rows: range) -> np.ndarray:
    """Values for blocks of a matrix, side by side for each of some rows."""
    blocks, outputs = parts[name], parts["qdata"].shape[0]
    return all_of(blocks)[np.arange(rows.start, rows.stop) // (outputs // blocks.shape[0])]


def _scales_of_packed(parts: Parts, rows: range) -> np.ndarray:
    return all_of(parts["scale"]).T[rows.start : rows.stop]


def _offsets_of_packed(parts: Parts, rows: range) -> np.ndarray:
    """What the number 0 stands for, which is what these matrices store as zeros."""
    return all_of(parts["zero_point"]).T[rows.start : rows.stop]


def _plain(parts: Parts, rows: range, *, dtype: str) -> np.ndarray:
    """Values of 8 bits, with a scale and perhaps a zero for all, for rows or for blocks."""
    values, scale, zero = parts["qdata"], parts["scale"], parts.get("zero_point")
    found = rows_of(values, rows).astype(np.float32 if values.dtype == "F8_E4M3" else DTYPES[dtype])
    if zero is not None:
        found = found - _spread(all_of(zero), values.shape, rows).astype(found.dtype)
    scales = _spread(all_of(scale), values.shape, rows)
    if scales.dtype != found.dtype:
        found, scales = found.astype(np.float32), scales.astype(np.float32)
    return (found * scales).astype(DTYPES[dtype])


def _packed(parts: Parts, rows: range) -> np.ndarray:
    """Signed integers of 4 bits, the first of two in the lower half of a byte; scales are transposed."""
    data, scale = rows_of(parts["qdata"], rows).view(np.uint8), parts["scale"]
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(len(rows), -1)
    shape = (scale.shape[1], codes.shape[1])
    scales, zeros = (
        _spread(all_of(part).T, shape, rows).astype(np.float32) for part in (scale, parts["zero_point"])
    )
    return (((codes ^ 8).astype(np.float32) - 8) * scales + zeros).astype(DTYPES[scale.dtype])


def _spread(values: np.ndarray, shape: tuple[int, ...], rows: range) -> np.ndarray:
    """Values for blocks of a matrix as values for the elements of some of its rows."""
    high, wide = (size // blocks for size, blocks in zip(shape, values.shape, strict=True))
    return np.repeat(values[np.arange(rows.start, rows.stop) // high], wide, axis=1)
