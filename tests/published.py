"""Checkpoints whose matrices are numbers of 4 or 8 bits, in the layouts of libraries."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.quantised import WeightForm
from tests.helpers import GOLDENS

_QUANTISED = re.compile(r"\.(blocks|layers)\..*(?<!mlp\.gate)\.weight$")
"""Matrices of layers, without routers."""


class Matrix(NamedTuple):
    """A matrix of numbers, and the scales and zero points of equal groups of each row's inputs."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """In float32, where a product of these numbers and scales is exact."""
        return (self.numbers - self._spread(self.zeros)) * self._spread(self.scales)

    def kept(self, form: WeightForm) -> np.ndarray:
        """What a device keeps: in uint4 each group has a scale and an offset in bfloat16."""
        if form != "uint4":
            return self.values
        offsets = -self.zeros.astype(np.float32) * self.scales.astype(np.float32)
        scales, offsets = (self._spread(each.astype(jnp.bfloat16)) for each in (self.scales, offsets))
        return self.numbers * scales + offsets

    def _spread(self, of_groups: np.ndarray) -> np.ndarray:
        return of_groups.astype(np.float32).repeat(self.numbers.shape[1] // of_groups.shape[1], axis=1)


Parts = dict[str, np.ndarray]


class Scheme(NamedTuple):
    """How a library stores matrices.

    - `form`: the form of the device that has the same numbers.
    - `bits`, `group`: of a number, and the inputs that share a scale; 0 for all of a row.
    - `scale`: the type of the scales.
    - `pack`: what is stored of a matrix, by the ends of names that follow the module and a point.
    - `settings`: of `config.json`.
    - `told`: of the metadata, for each matrix.
    - `zeros`: whether groups have zero points.
    """

    form: WeightForm
    bits: int
    group: int
    scale: Any
    pack: Callable[[Matrix], Parts]
    settings: dict[str, Any]
    told: dict[str, Any] | None = None
    zeros: bool = False


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits in words of 32, the first of a row in the lowest bits."""
    each = 32 // bits
    fields = numbers.astype(np.int64).reshape(len(numbers), -1, each) + (1 << (bits - 1))
    found = (fields << (bits * np.arange(each))).sum(axis=-1)
    return np.ascontiguousarray(found, np.uint32).view(np.int32)


def gptq(matrix: Matrix, bits: int = 4, stored_zero: int = 7) -> Parts:
    inputs, groups = matrix.numbers.shape[1], matrix.scales.shape[1]
    return {
        "qweight": np.ascontiguousarray(words(matrix.numbers, bits).T),
        "qzeros": words(matrix.zeros.T.astype(np.int16) + stored_zero - (1 << (bits - 1)), bits),
        "scales": np.ascontiguousarray(matrix.scales.T),
        "g_idx": (np.arange(inputs) // (inputs // groups)).astype(np.int32),
    }


def awq(matrix: Matrix) -> Parts:
    def by_outputs(numbers: np.ndarray) -> np.ndarray:
        eights = numbers.T.reshape(numbers.shape[1], -1, 8)
        return words(eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape[1], -1), 4)

    return {
        "qweight": by_outputs(matrix.numbers),
        "qzeros": by_outputs(matrix.zeros),
        "scales": np.ascontiguousarray(matrix.scales.T),
    }


def compressed(matrix: Matrix, bits: int = 4) -> Parts:
    shape = np.array(matrix.numbers.shape, np.int64)
    parts = {
        "weight_packed": words(matrix.numbers, bits),
        "weight_scale": matrix.scales,
        "weight_shape": shape,
    }
    return parts | ({"weight_zero_point": words(matrix.zeros.T, bits).T.copy()} if matrix.zeros.any() else {})


def torchao(matrix: Matrix) -> Parts:
    return {
        "_weight_qdata": matrix.numbers,
        "_weight_scale": matrix.scales,
        "_weight_zero_point": matrix.zeros,
    }


def torchao_pairs(matrix: Matrix) -> Parts:
    low, high = (matrix.numbers[:, first::2] & 15 for first in range(2))
    scales = np.ascontiguousarray(matrix.scales.T)
    return {
        "_weight_qdata": (low | (high << 4)).astype(np.int8),
        "_weight_scale": scales,
        "_weight_zero_point": np.zeros_like(scales),
    }


def _gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False, **more}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "format": form}
    if form == "float-quantized":
        group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def _ao(kind: str, **data: Any) -> dict[str, Any]:
    of_values = {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    return {"_type": kind, "_data": of_values | data}


_NARROW = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}}
_AO = {"quant_method": "torchao", "quant_type": {"default": {}}}

SCHEMES = {
    "gptq": Scheme("int4", 4, 128, np.float16, gptq, _gptq(4, 128)),
    "gptq_v2": Scheme(
        "int4", 4, 128, np.float16, lambda m: gptq(m, 4, 8), _gptq(4, 128, checkpoint_format="gptq_v2")
    ),
    "gptq_rows": Scheme("int4", 4, 0, np.float16, gptq, _gptq(4, -1)),
    "gptq_8": Scheme("int8", 8, 0, np.float16, lambda m: gptq(m, 8, 127), _gptq(8, -1)),
    "w4a16": Scheme("int4", 4, 128, jnp.bfloat16, compressed, _compressed("pack-quantized", num_bits=4)),
    "w8a16": Scheme(
        "int8", 8, 0, jnp.bfloat16, lambda m: compressed(m, 8), _compressed("pack-quantized", num_bits=8)
    ),
    "int8": Scheme(
        "int8",
        8,
        0,
        np.float16,
        lambda m: {"weight": m.numbers, "weight_scale": m.scales},
        _compressed("int-quantized", num_bits=8),
    ),
    "fp8_dynamic": Scheme(
        "fp8",
        5,  # all these integers are floats of 8 bits, too
        0,
        jnp.bfloat16,
        lambda m: {"weight": m.numbers.astype(jnp.float8_e4m3fn), "weight_scale": m.scales},
        _compressed("float-quantized", num_bits=8, type="float"),
    ),
    "ao_int8": Scheme("int8", 8, 0, np.float32, torchao, _AO, _ao("Int8Tensor")),
    "ao_intx4": Scheme(
        "int4", 4, 128, jnp.bfloat16, torchao, _AO, _ao("IntxUnpackedToInt8Tensor", **_NARROW)
    ),
    "ao_int4": Scheme("int4", 4, 128, jnp.bfloat16, torchao_pairs, _AO, _ao("Int4Tensor")),
    "gptq_32": Scheme("uint4", 4, 32, np.float16, gptq, _gptq(4, 32)),
    "gptq_zeros": Scheme("uint4", 4, 128, np.float16, gptq, _gptq(4, 128), zeros=True),
    "awq": Scheme("uint4", 4, 64, np.float16, awq, {"quant_method": "awq", "bits": 4}, zeros=True),
    "w4a16_zeros": Scheme(
        "uint4", 4, 32, jnp.bfloat16, compressed, _compressed("pack-quantized", num_bits=4), zeros=True
    ),
    "ao_intx4_zeros": Scheme(
        "uint4", 4, 32, jnp.bfloat16, torchao, _AO, _ao("IntxUnpackedToInt8Tensor", **_NARROW), zeros=True
    ),
}


def small_config(**changed: Any) -> ModelConfig:
    """A LLaDA with inputs of one and of two groups."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_layers": 2}
    return dataclasses.replace(config_from_hf(GOLDENS / "llada"), **(sizes | changed))


def plain_checkpoint(directory: Path, **changed: Any) -> Path:
    """A LLaDA in float32, as the libraries quantise it."""
    return write_random_checkpoint(directory, llada_hf_config(small_config(**changed), "float32"))


def drawn(shape: tuple[int, ...], scheme: Scheme, rng: np.random.Generator) -> Matrix:
    """A matrix whose numbers are any of these bits: rounding it again would give others."""
    most = 1 << (scheme.bits - 1)
    scales = rng.uniform(0.5, 1, (shape[0], shape[1] // (scheme.group or shape[1]))) / (16 * most)
    zeros = rng.integers(-7, 8, scales.shape) * scheme.zeros
    numbers = rng.integers(-most, most, shape).astype(np.int8)
    return Matrix(numbers, scales.astype(scheme.scale), zeros.astype(np.int8))


def publish(
    plain: Path, target: Path, scheme: Scheme, change: Callable[[str, Parts], Parts] = lambda _, parts: parts
) -> dict[str, Matrix]:
    """Write a checkpoint with drawn matrices in place of those of a plain one.

    Arguments:
    - `change`: of what is stored of each matrix, by the matrix's name.

    Returns the matrices by their names.
    """
    rng, stored, found, metadata = np.random.default_rng(0), {}, {}, {"format": "pt"}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.ndim == 1 or not _QUANTISED.search(name):
            stored[name] = tensor
            continue
        found[name], module = drawn(tensor.shape, scheme, rng), name.removesuffix("weight")
        stored |= {f"{module}{part}": x for part, x in change(name, scheme.pack(found[name])).items()}
        metadata |= {name: json.dumps(scheme.told)} if scheme.told else {}
    target.mkdir()
    save_file(stored, target / "model.safetensors", metadata)
    config = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.settings}))
    return found


def with_values(plain: Path, target: Path, matrices: dict[str, Matrix], form: WeightForm) -> Path:
    """A plain checkpoint that has what a device keeps of these matrices in a form."""
    shutil.copytree(plain, target, copy_function=shutil.copyfile)
    tensors = load_file(plain / "model.safetensors")
    values = {name: matrix.kept(form) for name, matrix in matrices.items()}
    save_file(tensors | values, target / "model.safetensors", {"format": "pt"})
    return target
