"""Numbers of 8 bits in registers as operands of the tensor cores, inside kernels of Pallas.

A product takes an operand of 16 bits in `WGMMA`'s layout: of 16 columns a thread has two pairs. A thread
loads four neighbours of 8 bits in one word. In the order of `jdllm.quantised` these four are the two pairs,
so that threads exchange nothing.

Two's complement is the lower seven bits less 128 times the highest. A 16-bit float whose last place is one
takes seven bits in its mantissa as they are. So both parts are one operation for two numbers each, and their
difference is the third one.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Float, Int8

_AND_OR = 0xEA  # the table of (a & b) | c
_FORMS = {
    jnp.dtype(jnp.bfloat16): (0x43004300, "bf16x2", ir.BF16Type),
    jnp.dtype(jnp.float16): (0x64006400, "f16x2", ir.F16Type),
}
"""A pair of floats that take seven bits, the name of a pair, and the type of a number."""


def widened(values: Int8[Array, "columns depth"], dtype: jnp.dtype) -> Float[Array, "columns depth"]:
    """Numbers as an operand of a product.

    Arguments:
    - `values`: in the layout `WGMMA_UPCAST_2X`, in the order of `jdllm.quantised`.
    - `dtype`: bfloat16 or float16, of the result, whose order is that of the inputs.
    """
    base, pair, kind = _FORMS[jnp.dtype(dtype)]

    def run(_, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(values.shape), dtype=object)
        vector = ir.VectorType.get((2,), kind.get())
        for index, register in np.ndenumerate(values.registers):
            word = utils.bitcast(register, i32)
            for half in range(2):
                place = (index[0], 2 * index[1] + half, *index[2:-1])
                registers[place] = utils.bitcast(_pair(word, half, base, pair), vector)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(values.shape, dtype, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_UPCAST_2X,), return_type=result)(run)(values)


def _pair(word: ir.Value, half: int, base: int, pair: str) -> ir.Value:
    """Bytes 0 and 2 of a word as two floats, or bytes 1 and 3."""
    source, shift = ("s", "shr.u32 s, $1, 8;") if half else ("$1", "")
    ptx = f"""
    {{
    .reg .b32 s, low, high;
    {shift}
    lop3.b32 low, {source}, 0x007f007f, {base:#x}, {_AND_OR:#x};
    lop3.b32 high, {source}, 0x00800080, {base:#x}, {_AND_OR:#x};
    sub.{pair} $0, low, high;
    }}
    """
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [word], ptx, "=r,r")
