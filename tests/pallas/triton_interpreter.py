"""Kernels of Triton on a CPU: its interpreter, with NumPy arrays for the tensors of a card.

Whether functions of `triton.jit` are compiled or interpreted is decided as they are made, Triton's own
included. So a process does one of both: the first that imports it decides.
"""

import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.triton_launch import Schedule

_MARK = "jdllm_interprets"
_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "int8": "i8",
    "int32": "i32",
    "uint8": "u8",
    "uint32": "u32",
}


class Tensor:
    """As much of a tensor as the interpreter asks for; it lies in host memory already."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, _NAMES[str(array.dtype)]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def new_empty(self, size: int, device: str) -> "Tensor":
        return Tensor(self.array[:0])

    def set_(self, storage: "Tensor", *place: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, other: "Tensor") -> None:
        """Nothing was copied, so there is nothing to copy back."""


def launch(
    kernel: Any,
    *operands: jax.Array | int,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    schedule: Schedule,
    **constants: float,
) -> list[jax.Array]:
    """As `jdllm.pallas.triton_launch.launch`; results are NaN or the least integer until they are written."""
    passed = [x if isinstance(x, int) else Tensor(np.array(x)) for x in operands]
    results = [Tensor(np.full(out.shape, _poison(out.dtype), out.dtype)) for out in out_shape]
    # A card raises nothing where numbers end.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        kernel[grid](*passed, *results, **constants)
    return [jnp.asarray(result.array) for result in results]


def _poison(dtype: np.dtype) -> float:
    return np.iinfo(dtype).min if np.issubdtype(dtype, np.integer) else np.nan


def interpreted(operator: str) -> Iterator[Any]:
    """The module of an operator's form, for a fixture of a test module: its kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        if not hasattr(sys.modules.get("triton"), _MARK) and "triton" in sys.modules:
            pytest.fail("this process compiles kernels of Triton")
        triton = pytest.importorskip("triton")
        setattr(triton, _MARK, True)
        interpreter = importlib.import_module("triton.runtime.interpreter")
        patch_tensor = interpreter._patch_lang_tensor

        def patch_index_too(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            # NumPy 2.5 makes no integer of an array with one element.
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        builder = interpreter.InterpreterBuilder
        dot = builder.create_dot

        def dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
            # It holds bfloat16 as the bits, which it would multiply.
            bf16, f32 = triton.language.bfloat16, triton.language.float32
            a, b = (self.cast_impl(x, f32) if x.dtype.scalar == bf16 else x for x in (a, b))
            return dot(self, a, b, *others)

        def map_elementwise(function: Any, *args: Any) -> Any:
            return function(*args)

        patch.setattr(interpreter, "_patch_lang_tensor", patch_index_too)
        patch.setattr(triton.language, "map_elementwise", map_elementwise)
        patch.setattr(builder, "create_dot", dot_of_numbers)
        form = importlib.import_module(f"jdllm.pallas.{operator}.triton")
        patch.setattr(form, "launch", launch)
        yield form
