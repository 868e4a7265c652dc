"""Weights as GPTQModel, AutoGPTQ and AutoAWQ store them: integers, packed, in a transposed matrix.

A value is (q - zero) * scale, in the type of the scale, as the libraries compute it.
"""

import functools

import numpy as np

from jdllm.checkpoints.index import DTYPES, Index, Numbers, StoredTensor
from jdllm.checkpoints.quantised.packed import (
    Decode,
    PackedTensor,
    Parts,
    all_of,
    fields,
    in_equal_groups,
    numbers,
    scaled,
    unread,
)
from jdllm.models.quantization import Quantization
from jdllm.quantised import WeightForm

_WORD = 32
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""In which of the eight fields of a word each of eight neighbours is."""
_FORMS: dict[int, WeightForm] = {4: "int4", 8: "int8"}


def dequantised(index: Index, quantization: Quantization) -> Index:
    """The tensors of a checkpoint with a matrix for each quantised one.

    Arguments:
    - `index`: what is stored.
    - `quantization`: of its `config.json`.

    Raises `CheckpointError` for a matrix that is stored in another way than the configuration says.
    """
    found = dict(index)
    for name in [name for name in found if name.endswith(".qweight")]:
        module = name.removesuffix("qweight")
        names = [part for part in ("qweight", "qzeros", "scales", "g_idx") if module + part in found]
        parts = {part: found.pop(module + part) for part in names}
        found[f"{module}weight"] = _matrix(module.removesuffix("."), parts, quantization)
    return found


def _matrix(module: str, parts: Parts, quantization: Quantization) -> PackedTensor:
    bits, each = quantization.bits, _WORD // quantization.bits
    stored = {name: (part.dtype, *part.shape) for name, part in parts.items()}
    found = None
    match stored.get("qweight"), stored.get("scales"):
        case ("I32", words, outputs), (dtype, groups, _) if quantization.method == "gptq":
            shape = (outputs, words * each)
            found = functools.partial(_gptq, bits=bits, shift=quantization.shift)
        case ("I32", inputs, words), (dtype, groups, _) if quantization.method == "awq":
            shape, found = (words * each, inputs), _awq
    if found is not None and dtype in DTYPES and shape[1] % groups == 0:
        expected = {"qzeros": ("I32", groups, shape[0] // each), "scales": (dtype, groups, shape[0])}
        expected |= {"g_idx": ("I32", shape[1])} if "g_idx" in stored else {}
        if stored == expected | {"qweight": stored["qweight"]}:
            kept = _KEPT[quantization.method](parts, shape, quantization)
            return PackedTensor.of(parts, dtype, shape, found, kept)
    raise unread(module, parts)


def _gptq(parts: Parts, rows: range, *, bits: int, shift: int) -> np.ndarray:
    """Packed along inputs; zeros along outputs, each less by `shift`. Words add and borrow as a whole."""
    q, scales = fields(_columns_of(parts["qweight"], rows).T, bits), _scales(parts, rows)
    zeros, group = _gptq_zeros(parts, rows, bits=bits, shift=shift), _group(parts, q.shape[1])
    return scaled(q, scales.take(group, axis=1), zeros.take(group, axis=1))


def _gptq_zeros(parts: Parts, rows: range, *, bits: int, shift: int) -> np.ndarray:
    return fields(_words_of_zeros(parts, bits, shift), bits)[:, rows.start : rows.stop].T


def _kept_of_gptq(parts: Parts, shape: tuple[int, int], quantization: Quantization) -> tuple[Numbers, ...]:
    """What a device keeps of a matrix: its words, bit by bit. In 8 bits all zeros are in the middle."""
    bits, shift, (rows, inputs) = quantization.bits, quantization.shift, shape
    form, middle, group = _FORMS.get(bits), _in_each_field(1 << (bits - 1), bits), _group(parts, inputs)
    if form is None:
        return ()
    decode = _words if form == "int4" else _signed_words
    values = PackedTensor.of(parts, "I32", (rows, inputs * bits // _WORD), decode)
    symmetric = (_words_of_zeros(parts, bits, shift) == middle).all()
    found = numbers(form, values, parts, _scales, group) if symmetric else ()
    if bits == 4:
        offsets = functools.partial(_offsets, zeros=functools.partial(_gptq_zeros, bits=bits, shift=shift))
        found += numbers("uint4", values, parts, _scales, group, offsets)
    return found


def _words(parts: Parts, rows: range) -> np.ndarray:
    return _columns_of(parts["qweight"], rows).T


def _signed_words(parts: Parts, rows: range) -> np.ndarray:
    """Words whose numbers of 8 bits are signed."""
    return _words(parts, rows) ^ np.uint32(0x80808080).view(np.int32)


def _words_of_zeros(parts: Parts, bits: int, shift: int) -> np.ndarray:
    return all_of(parts["qzeros"]).view(np.uint32) + np.uint32(_in_each_field(shift, bits))


def _in_each_field(value: int, bits: int) -> int:
    return sum(value << at for at in range(0, _WORD, bits))


def _scales(parts: Parts, rows: range) -> np.ndarray:
    return _columns_of(parts["scales"], rows).T


def _group(parts: Parts, inputs: int) -> np.ndarray:
    """Which scale and zero of its row each input has."""
    order = parts.get("g_idx")
    return in_equal_groups(inputs, parts["scales"].shape[0]) if order is None else all_of(order)


def _awq(parts: Parts, rows: range) -> np.ndarray:
    """4 bits, packed along outputs, of which the even ones of eight come first; zeros too."""
    q, zeros, scales = _outputs(parts, rows), _awq_zeros(parts, rows), _scales(parts, rows)
    width = q.shape[1] // scales.shape[1]
    return scaled(q, np.repeat(scales, width, axis=1), np.repeat(zeros, width, axis=1))


def _outputs(parts: Parts, rows: range, *, name: str = "qweight") -> np.ndarray:
    """Numbers of some outputs, side by side for each of them."""
    stored, words = parts[name], range(rows.start // 8, -(-rows.stop // 8))
    here = slice(rows.start - 8 * words.start, rows.stop - 8 * words.start)
    of_words = fields(_columns_of(stored, words), 4).reshape(stored.shape[0], -1, 8)
    return np.ascontiguousarray(of_words[..., _AWQ_ORDER].reshape(stored.shape[0], -1)[:, here].T)


def _awq_zeros(parts: Parts, rows: range) -> np.ndarray:
    return _outputs(parts, rows, name="qzeros")


def _kept_of_awq(parts: Parts, shape: tuple[int, int], quantization: Quantization) -> tuple[Numbers, ...]:
    """What a device keeps of a matrix: pairs of its numbers."""
    del quantization
    rows, inputs = shape
    values = PackedTensor.of(parts, "U8", (rows, inputs // 2), _pairs)
    offsets = functools.partial(_offsets, zeros=_awq_zeros)
    return numbers("uint4", values, parts, _scales, _group(parts, inputs), offsets)


def _pairs(parts: Parts, rows: range) -> np.ndarray:
    q = _outputs(parts, rows)
    return q[:, ::2] | (q[:, 1::2] << 4)


def _offsets(parts: Parts, rows: range, *, zeros: Decode) -> np.ndarray:
    """What the number 0, which is stored as 8, stands for."""
    return _scales(parts, rows).astype(np.float32) * (8 - zeros(parts, rows).astype(np.float32))


_KEPT = {"gptq": _kept_of_gptq, "awq": _kept_of_awq}


def _columns_of(stored: StoredTensor, columns: range) -> np.ndarray:
    return stored.read([range(stored.shape[0]), columns])
