"""Weights as bitsandbytes stores them: codes of 4 bits in blocks, or int8 with a scale for each row."""

import functools
import json
from typing import NamedTuple

import numpy as np

from jdllm.checkpoints.index import DTYPES, Index, StoredTensor
from jdllm.checkpoints.quantised.packed import PackedTensor, Parts, all_of, in_equal_groups, numbers, rows_of
from jdllm.errors import CheckpointError
from jdllm.models.quantization import Quantization

_STATE = "quant_state.bitsandbytes__"
_INT8 = np.float32(7.874015718698502e-3)  # 1 / 127, as the library has it


def dequantised(index: Index, quantization: Quantization) -> Index:
    """The tensors of a checkpoint with a matrix for each quantised one.

    Arguments:
    - `index`: what is stored.
    - `quantization`: of its `config.json`.

    Raises `CheckpointError` for a matrix that is stored in another way than the library stores it.
    """
    del quantization  # the tensors tell
    found, of_codes = dict(index), dict[str, dict[str, StoredTensor]]()
    for name in index:
        module, _, part = name.partition(".weight.")
        if part:
            of_codes.setdefault(f"{module}.weight", {})[part] = found.pop(name)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('SCB')}weight"
            found.pop(f"{weight}_format", None)
            found[weight] = _of_int8(name, found.get(weight), found.pop(name))
    for weight, parts in of_codes.items():
        if weight not in found:
            raise CheckpointError(f"the checkpoint has {', '.join(parts)} of {weight}, and no codes")
        found[weight] = _of_codes(weight, {"codes": found[weight], **parts})
    return found


def _of_int8(name: str, values: StoredTensor | None, scale: StoredTensor) -> PackedTensor:
    if values is None or values.dtype != "I8" or scale.shape != values.shape[:1]:
        raise CheckpointError(f"{name} is no scale of int8 weights that the checkpoint has")
    parts = {"values": values, "scale": scale}
    kept = numbers("int8", values, parts, _scales_of_int8, in_equal_groups(values.shape[1], 1))
    return PackedTensor.of(parts, "F32", values.shape, _int8, kept)


class _Codes(NamedTuple):
    """How codes are laid out: matrices of so many columns, in blocks of so many elements that share a scale;
    scales are codes too in blocks of `nested`, less by `offset`, where `nested` is not 0."""

    columns: int
    block: int
    nested: int
    offset: float


def _of_codes(name: str, parts: Parts) -> PackedTensor:
    [state] = [part for key, part in parts.items() if key.startswith(_STATE)] or [None]
    try:
        if state is None:
            raise KeyError(_STATE)
        told = json.loads(all_of(state).tobytes())
        shape, dtype = tuple(told["shape"]), _NAMES[told["dtype"]]
        rows, columns = shape
        codes = _Codes(
            columns, told["blocksize"], told.get("nested_blocksize", 0), told.get("nested_offset", 0.0)
        )
    except (KeyError, ValueError, TypeError) as e:
        raise CheckpointError(f"{name} has codes of 4 bits, and no state that tells of them: {e!r}") from None
    if columns % 2 or 2 * parts["codes"].shape[0] != rows * columns:
        raise CheckpointError(
            f"{name} has {2 * parts['codes'].shape[0]} codes, and its state says {list(shape)}"
        )
    return PackedTensor.of(parts, dtype, shape, functools.partial(_decoded, codes=codes, dtype=dtype))


_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}


def _decoded(parts: Parts, rows: range, *, codes: _Codes, dtype: str) -> np.ndarray:
    """The upper half of each byte is the first of two."""
    first, last = rows.start * codes.columns, rows.stop * codes.columns
    data = rows_of(parts["codes"], range(first // 2, last // 2)).reshape(-1)
    values = all_of(parts["quant_map"])[np.stack([data >> 4, data & 15], axis=-1).reshape(-1)]
    blocks = range(first // codes.block, -(-last // codes.block))
    scales = np.repeat(_scales(parts, blocks, codes), codes.block)[first - blocks.start * codes.block :]
    return (values * scales[: len(values)]).reshape(len(rows), -1).astype(DTYPES[dtype])


def _scales(parts: Parts, blocks: range, codes: _Codes) -> np.ndarray:
    scales = rows_of(parts["absmax"], blocks)
    if not codes.nested:
        return scales
    of_all = all_of(parts["nested_absmax"])[np.arange(blocks.start, blocks.stop) // codes.nested]
    return all_of(parts["nested_quant_map"])[scales] * of_all + np.float32(codes.offset)


def _int8(parts: Parts, rows: range) -> np.ndarray:
    values, scale = rows_of(parts["values"], rows), rows_of(parts["scale"], rows)
    return values.astype(np.float32) * scale[:, None] * _INT8


def _scales_of_int8(parts: Parts, rows: range) -> np.ndarray:
    return rows_of(parts["scale"], rows)[:, None] * _INT8
