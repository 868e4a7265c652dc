"""Weights as the library compressed-tensors stores them, and as DeepSeek's fp8 blocks.

A value is (q - zero) * scale, in the type of the scale, as the library computes it.
"""

import functools

import numpy as np

from jdllm.checkpoints.index import DTYPES, Index, Numbers, StoredTensor
from jdllm.checkpoints.quantised.packed import (
    PackedTensor,
    Parts,
    all_of,
    fields,
    in_equal_groups,
    numbers,
    rows_of,
    scaled,
    unread,
)
from jdllm.models.quantization import Quantization

_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4 = np.concatenate([_POSITIVE, -1 * _POSITIVE])  # by their codes
_VALUES, _SCALES = ("packed", "values"), ("scale", "scale_inv")

_UNUSED = tuple(
    f".{what}_{name}" for what in ("input", "output") for name in ("scale", "zero_point", "global_scale")
)
"""Of activations, which stay in 16 bits."""


def dequantised(index: Index, quantization: Quantization) -> Index:
    """The tensors of a checkpoint with a matrix for each quantised one.

    Arguments:
    - `index`: what is stored.
    - `quantization`: of its `config.json`.

    Raises `CheckpointError` for a matrix that is stored in another way than the configuration says.
    """
    found = {name: stored for name, stored in index.items() if not name.endswith(_UNUSED)}
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in found.items():
        module, _, part = name.rpartition(".")
        if part.startswith("weight"):
            modules.setdefault(module, {})[part] = stored
    for module, parts in modules.items():
        if quantization.scale in parts:
            for part in parts:
                del found[f"{module}.{part}"]
            found[f"{module}.weight"] = _matrix(module, parts, quantization)
    return found


def _matrix(module: str, parts: Parts, quantization: Quantization) -> PackedTensor:
    """The weight of one module, by the names of its parts."""
    named = {name.removeprefix("weight").removeprefix("_") or "values": part for name, part in parts.items()}
    values, scale = (named.get(one) or named.get(other) for one, other in (_VALUES, _SCALES))
    found = None
    if values is not None and scale is not None:
        found = _form(named, values, scale, quantization)
    if found is None:
        raise unread(module, parts)
    return found


def _form(
    named: Parts, values: StoredTensor, scale: StoredTensor, quantization: Quantization
) -> PackedTensor | None:
    """The matrix of parts in a form that is read; `None` for others."""
    names, (rows, width) = named.keys() - {"zero_point"}, values.shape if len(values.shape) == 2 else (0, 0)
    if named.keys() == {"packed", "scale", "global_scale"} and values.dtype == "U8":
        fits = len(scale.shape) == 2 and scale.shape[0] == rows and 2 * width % scale.shape[1] == 0
        return PackedTensor.of(named, "BF16", (rows, 2 * width), _nvfp4) if fits else None
    if scale.dtype not in DTYPES:
        return None
    if names == {"packed", "scale", "shape"} and values.dtype == "I32" and named["shape"].shape == (2,):
        shape = tuple(int(size) for size in all_of(named["shape"]))
        bits = width * 32 // max(1, shape[1])
        if shape[0] == rows and 1 <= bits <= 8 and _spreads(scale.shape, shape, None):
            decode = functools.partial(_integers, columns=shape[1])
            return PackedTensor.of(named, scale.dtype, shape, decode, _kept_of_words(named, shape, bits))
    block = quantization.block
    plain = names in ({"values", "scale"}, {"values", "scale_inv"}) and values.dtype in ("I8", "F8_E4M3")
    if plain and _spreads(scale.shape, values.shape, block):
        decode = functools.partial(_plain, block=block)
        fits = block is None and (values.dtype == "I8" or quantization.rounds_rows)
        kept = _kept_of_bytes(named, values) if fits else ()
        return PackedTensor.of(named, scale.dtype, values.shape, decode, kept)
    return None


def _spreads(scale: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    """Whether scales of one shape are for parts of a matrix of another one."""
    rows, columns = (*scale, 1, 1)[:2]
    if block is not None:
        return (rows, columns) == tuple(-(-size // of) for size, of in zip(shape, block, strict=True))
    return rows in (1, shape[0]) and columns > 0 and shape[1] % columns == 0


def _plain(parts: Parts, rows: range, *, block: tuple[int, int] | None) -> np.ndarray:
    """Values of 8 bits, with a scale for all, for each row, for groups of a row's columns, or for blocks."""
    values, scale = parts["values"], parts.get("scale") or parts["scale_inv"]
    shape, q = values.shape, rows_of(values, rows)
    zero = parts.get("zero_point")
    zeros = None if zero is None else _spread(all_of(zero), shape, rows, block)
    return scaled(q, _spread(all_of(scale), shape, rows, block), zeros)


def _integers(parts: Parts, rows: range, *, columns: int) -> np.ndarray:
    """Integers of a few bits, packed along rows; zeros are packed along columns."""
    packed, scale, zero = parts["packed"], parts["scale"], parts.get("zero_point")
    shape, bits = (packed.shape[0], columns), packed.shape[1] * 32 // columns
    q = _unpacked(rows_of(packed, rows), bits, columns)
    zeros = None if zero is None else _spread(_unpacked_zeros(zero, bits, shape[0]), shape, rows, None)
    return scaled(q, _spread(all_of(scale), shape, rows, None), zeros)


def _kept_of_bytes(parts: Parts, values: StoredTensor) -> tuple[Numbers, ...]:
    """What a device keeps of a matrix of int8, or of floats of 8 bits."""
    zero = parts.get("zero_point")
    if zero is not None and all_of(zero).any():
        return ()
    form = "int8" if values.dtype == "I8" else "fp8"
    return numbers(form, values, parts, _scales, _group(parts, values.shape[1]))


def _kept_of_words(parts: Parts, shape: tuple[int, ...], bits: int) -> tuple[Numbers, ...]:
    """What a device keeps of packed integers: of 4 bits the words as they are, each number plus 8."""
    packed, zero, group = parts["packed"], parts.get("zero_point"), _group(parts, shape[1])
    shifted = zero is not None and bool(_unpacked_zeros(zero, bits, shape[0]).any())
    full = bits * shape[1] == 32 * packed.shape[1]
    if bits == 4 and full:
        found = () if shifted else numbers("int4", packed, parts, _scales, group)
        return found + numbers("uint4", packed, parts, _scales, group, _offsets if shifted else None)
    if bits == 8 and full and not shifted:
        return numbers("int8", PackedTensor.of(parts, "I32", packed.shape, _signed), parts, _scales, group)
    return ()


def _signed(parts: Parts, rows: range) -> np.ndarray:
    """Words of integers of 8 bits that are signed."""
    return rows_of(parts["packed"], rows) ^ np.uint32(0x80808080).view(np.int32)


def _group(parts: Parts, inputs: int) -> np.ndarray:
    """Which scale of its row each input has."""
    return in_equal_groups(inputs, (*parts["scale"].shape, 1, 1)[1])


def _scales(parts: Parts, rows: range) -> np.ndarray:
    return _of_rows(all_of(parts["scale"]), rows, None)


def _offsets(parts: Parts, rows: range) -> np.ndarray:
    """What the number 0 stands for in matrices of 4 bits."""
    zeros = _of_rows(_unpacked_zeros(parts["zero_point"], 4, parts["packed"].shape[0]), rows, None)
    return _scales(parts, rows).astype(np.float32) * -zeros.astype(np.float32)


def _unpacked_zeros(zero: StoredTensor, bits: int, rows: int) -> np.ndarray:
    return _unpacked(all_of(zero).T, bits, rows).T


def _nvfp4(parts: Parts, rows: range) -> np.ndarray:
    """Floats of 4 bits, the first of two in the lower half of a byte, with a scale for 16 and one for all."""
    packed = rows_of(parts["packed"], rows)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(rows), -1)
    values, scale, of_all = _FP4[codes], parts["scale"], parts["global_scale"]
    scales = rows_of(scale, rows).astype(np.float32) / all_of(of_all)
    return (values * np.repeat(scales, values.shape[1] // scale.shape[1], axis=1)).astype(DTYPES["BF16"])


def _unpacked(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Signed integers of so many bits."""
    return np.subtract(fields(words, bits)[:, :columns], 1 << (bits - 1), dtype=np.int16)


def _spread(
    values: np.ndarray, shape: tuple[int, ...], rows: range, block: tuple[int, int] | None
) -> np.ndarray:
    """Values for parts of a matrix as values for its elements, as far as they differ in a row.

    Arguments:
    - `values`: one for all, for each row, for groups of columns of each row, or for blocks.
    - `shape`: of the matrix; `rows`: of the result.
    - `block`: rows and columns of a block, `None` where there are none.
    """
    values = _of_rows(values, rows, block)
    if values.shape[1] == 1:
        return values
    wide = shape[1] // values.shape[1] if block is None else block[1]
    return np.repeat(values, wide, axis=1)[:, : shape[1]]


def _of_rows(values: np.ndarray, rows: range, block: tuple[int, int] | None) -> np.ndarray:
    """The same values, side by side for each row."""
    values = values.reshape(-1, 1) if values.ndim < 2 else values
    if len(values) == 1:
        return np.broadcast_to(values, (len(rows), values.shape[1]))
    if block is None:
        return values[rows.start : rows.stop]
    return values[np.arange(rows.start, rows.stop) // block[0]]
