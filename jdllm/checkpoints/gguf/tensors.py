"""The weights of a GGUF file, under the names that the family has in Hugging Face checkpoints.

Values are those of `gguf.dequantize`, in f32. Files in the order of llama.cpp for rotated rows come out in
that of Hugging Face.
"""

import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jdllm.checkpoints.gguf.blocks import WIDER, kept_of_blocks
from jdllm.checkpoints.index import DTYPES, Index, Numbers, StoredTensor
from jdllm.checkpoints.quantised.packed import Decode, PackedTensor, Parts, rows_of
from jdllm.gguf_files import GgufTensor, read_gguf
from jdllm.models.gguf_config import ROPE_FACTORS, architecture_of, read_gguf_config
from jdllm.models.registry import family_of

_LEAVES = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
    "attn_norm.weight": "layers/attn_norm",
    "attn_q.weight": "layers/q",
    "attn_k.weight": "layers/k",
    "attn_v.weight": "layers/v",
    "attn_q.bias": "layers/q_bias",
    "attn_k.bias": "layers/k_bias",
    "attn_v.bias": "layers/v_bias",
    "attn_q_norm.weight": "layers/q_norm",
    "attn_k_norm.weight": "layers/k_norm",
    "attn_output.weight": "layers/o",
    "ffn_norm.weight": "layers/ffn_norm",
    "ffn_gate.weight": "layers/gate",
    "ffn_up.weight": "layers/up",
    "ffn_down.weight": "layers/down",
    "ffn_gate_inp.weight": "layers/router",
    "ffn_gate_exps.weight": "layers/experts_gate",
    "ffn_up_exps.weight": "layers/experts_up",
    "ffn_down_exps.weight": "layers/experts_down",
}
"""Path in the spec tree, by the name of a tensor without that of its layer."""

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ROTATED = ("layers/q", "layers/k")


def read_gguf_index(path: Path) -> Index:
    """Read which tensors a model holds.

    Arguments:
    - `path`: the GGUF file, or any file of a split.

    Returns every tensor by its Hugging Face name; tensors that the family does not have keep their own, and
    types that the package `gguf` does not decode are those of the result.

    Raises what `read_gguf_config` and the family's parser raise.
    """
    gguf = read_gguf(path)
    values = read_gguf_config(path)
    family = family_of(values)
    head_dim = family.config_from_hf(values).head_dim
    index: Index = {}
    for name, tensor in gguf.tensors.items():
        if name == ROPE_FACTORS:
            continue
        layer, short = match.groups() if (match := _LAYER.fullmatch(name)) else (None, name)
        leaf = _LEAVES.get(short, "")
        known = family.tensor_names.get(leaf, name)
        rotated = architecture_of(gguf).paired and leaf in _ROTATED
        stored = _stored(tensor, head_dim if rotated else None)
        if "{expert}" not in known:
            index[known.format(layer=layer)] = stored
            continue
        rows = tensor.shape[-2]
        for expert in range(math.prod(tensor.shape[:-2])):
            index[known.format(layer=layer, expert=expert)] = stored.rows(expert * rows, rows)
    return index


def _stored(tensor: GgufTensor, head_dim: int | None) -> StoredTensor:
    """A tensor as it is read: matrices of several experts as one, and heads of `head_dim` rows in halves."""

    def arranged(decode: Decode) -> Decode:
        return decode if head_dim is None else functools.partial(_in_halves, decode=decode, head_dim=head_dim)

    *rows, width = tensor.shape
    kept: tuple[Numbers, ...] = ()
    kind, shape = tensor.kind, (math.prod(rows), width) if rows else (width,)
    plain = kind.name in DTYPES
    if (plain and head_dim is None) or not rows or not (plain or _is_decoded(kind)):
        return StoredTensor(tensor.file, kind.name, shape, tensor.offset)
    if plain:
        stored = StoredTensor(tensor.file, kind.name, shape, tensor.offset)
        decode: Decode = _plain
    else:
        per_row = width // _sizes(kind)[0] * _sizes(kind)[1]
        stored = StoredTensor(tensor.file, "U8", (shape[0], per_row), tensor.offset)
        decode = functools.partial(_decoded, kind=kind)
        kept = kept_of_blocks(kind.name, stored, width, arranged)
    dtype, wider = kind.name if plain else "F32", kind.name in WIDER
    return PackedTensor.of({"rows": stored}, dtype, shape, arranged(decode), kept, may_round=wider)


def _plain(parts: Parts, rows: range) -> np.ndarray:
    return rows_of(parts["rows"], rows)


def _decoded(parts: Parts, rows: range, *, kind: Any) -> np.ndarray:
    from gguf import dequantize

    return dequantize(rows_of(parts["rows"], rows), kind)


def _in_halves(parts: Parts, rows: range, *, decode: Decode, head_dim: int) -> np.ndarray:
    """Rows of heads whose stored rows are 0, n, 1, n + 1 and so on, where n is half of `head_dim`."""
    first, last = rows.start // head_dim, -(-rows.stop // head_dim)
    stored = range(first * head_dim, last * head_dim)
    values = decode(parts, stored)
    halves = values.reshape(last - first, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
    return halves[rows.start - stored.start : rows.stop - stored.start]


def _sizes(kind: Any) -> tuple[int, int]:
    """Values and bytes of a block."""
    from gguf import GGML_QUANT_SIZES

    return GGML_QUANT_SIZES[kind]


@functools.cache
def _is_decoded(kind: Any) -> bool:
    """Whether the package decodes a type."""
    from gguf import dequantize

    try:
        dequantize(np.zeros((1, _sizes(kind)[1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
