"""Weights as GPTQModel, AutoGPTQ and AutoAWQ store them: integers, packed, in a transposed matrix.

A value is (q - zero) * scale, in the type of the scale, as the libraries compute it.
"""

import functools

import numpy as np

from jdllm.checkpoints.index import DTYPES, Index, StoredTensor
from jdllm.checkpoints.quantised.packed import PackedTensor, Parts, all_of, fields, scaled, unread
from jdllm.models.quantization import Quantization

_WORD = 32
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""In which of the eight fields of a word each of eight neighbours is."""


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
            return PackedTensor.of(parts, dtype, shape, found)
    raise unread(module, parts)


def _gptq(parts: Parts, rows: range, *, bits: int, shift: int) -> np.ndarray:
    """Packed along inputs; zeros along outputs, each less by `shift`. Words add and borrow as a whole."""
    q = fields(_columns_of(parts["qweight"], rows).T, bits)
    ones = sum(1 << at for at in range(0, _WORD, bits))
    words = all_of(parts["qzeros"]).view(np.uint32) + np.uint32(shift * ones)
    zeros = fields(words, bits)[:, rows.start : rows.stop]
    scales, order = _columns_of(parts["scales"], rows), parts.get("g_idx")
    width = q.shape[1] // len(scales)
    group = np.arange(q.shape[1]) // width if order is None else all_of(order)
    return scaled(q, scales.T[:, group], zeros.T[:, group])


def _awq(parts: Parts, rows: range) -> np.ndarray:
    """4 bits, packed along outputs, of which the even ones of eight come first; zeros too."""
    words = range(rows.start // 8, -(-rows.stop // 8))
    here = slice(rows.start - 8 * words.start, rows.stop - 8 * words.start)

    def outputs(name: str) -> np.ndarray:
        of_words = fields(_columns_of(parts[name], words), 4).reshape(parts[name].shape[0], -1, 8)
        return of_words[..., _AWQ_ORDER].reshape(parts[name].shape[0], -1)[:, here].T

    q, zeros, scales = outputs("qweight"), outputs("qzeros"), _columns_of(parts["scales"], rows).T
    width = q.shape[1] // scales.shape[1]
    return scaled(q, np.repeat(scales, width, axis=1), np.repeat(zeros, width, axis=1))


def _columns_of(stored: StoredTensor, columns: range) -> np.ndarray:
    return stored.read([range(stored.shape[0]), columns])
