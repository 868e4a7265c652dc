"""Numbers of few bits in registers as operands of the tensor cores, inside kernels of Pallas.

A product takes an operand of 16 bits in `WGMMA`'s layout: of 16 columns a thread has two pairs. A thread
loads four neighbours of 8 bits in one word. In the order of `jdllm.quantised` these four are the two pairs,
so that threads exchange nothing.

Two's complement is the lower seven bits less 128 times the highest. A 16-bit float whose last place is one
takes seven bits in its mantissa as they are. So both parts are one operation for two numbers each, and their
difference is the third one.

A float of 8 bits has the sign, four bits of exponent and three of mantissa. These seven bits are moved to the
lowest exponent bits and the highest mantissa bits of a 16-bit float, and the sign to its place. The result is
a power of two too small, which one multiplication mends. Numbers below the least normal one come out right,
too.

A number of 4 bits is stored as what it exceeds -8 by. A word has eight of them, which are two pairs of each
of two products. A pair takes one operation that moves its numbers to the lowest bits of both halves, one that
makes floats of them, and one that subtracts what they are too large by.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int8, UInt8

from jdllm.quantised import FLOAT8, SHIFTED_GROUP

_LANES, _WARPS = 32, 4  # of a warpgroup: threads of a warp, and warps
_NEIGHBOURS = 8  # numbers of 8 bits that a thread loads at once: as many of 16 bits are the widest store

_AND_OR = 0xEA  # the table of (a & b) | c
_STRIPS = SHIFTED_GROUP // 8  # of eight inputs, of which a register has two
_SHARED = 3  # the address space of shared memory
_FORMS = {
    jnp.dtype(jnp.bfloat16): (0x43004300, "bf16x2", ir.BF16Type),
    jnp.dtype(jnp.float16): (0x64006400, "f16x2", ir.F16Type),
}
"""A pair of floats that take seven bits, the name of a pair, and the type of a number."""


_SHIFTS = {jnp.dtype(jnp.bfloat16): (4, 0x7B807B80), jnp.dtype(jnp.float16): (7, 0x5C005C00)}
"""By how many places the mantissa of a float of 8 bits goes up, and a pair of the power of two that is then
missing: 2^120 and 2^8."""


def widened(
    values: Int8[Array, "columns depth"] | Float8e4m3fn[Array, "columns depth"], dtype: jnp.dtype
) -> Float[Array, "columns depth"]:
    """Numbers as an operand of a product.

    Arguments:
    - `values`: in the layout `WGMMA_UPCAST_2X`, in the order of `jdllm.quantised`.
    - `dtype`: bfloat16 or float16, of the result, whose order is that of the inputs.
    """
    if values.dtype == FLOAT8:
        return _pairs(values, dtype, 2, functools.partial(_pair_of_floats, *_SHIFTS[jnp.dtype(dtype)]))
    return _pairs(values, dtype, 2, _pair_of_bytes)


def widened_pairs(
    values: UInt8[Array, "columns half_depth"], dtype: jnp.dtype, part: int, parts: int
) -> Float[Array, "columns depth_of_part"]:
    """The same of numbers of 4 bits, two to a byte.

    Arguments:
    - `values`: in the layout `WGMMA_UPCAST_2X`, `jdllm.quantised.packed`.
    - `dtype`: bfloat16 or float16, of the result, whose order is that of the inputs.
    - `part`, `parts`: which part of the inputs, of so many.
    """
    return _pairs(values, dtype, 4, _pair_of_nibbles, part, parts)


def scaled_pairs(
    values: Float[Array, "columns depth"], scales: Float32[Array, " columns"]
) -> Float[Array, "columns depth"]:
    """Numbers times the scales of their columns, rounded to their type.

    A scale is the sum of two numbers of 16 bits: a pair takes a multiplication and a fused one, and no number
    is converted. The sum falls short of the scale by 2^-17 of the scale at most (bfloat16).

    Arguments:
    - `values`: whole numbers of 4 bits, bfloat16 or float16, in the layout `WGMMA`.
    - `scales`: in this layout, reduced by its second axis.
    """
    pair = _FORMS[jnp.dtype(values.dtype)][1]
    high = scales.astype(values.dtype)
    low = (scales - high.astype(jnp.float32)).astype(values.dtype)
    across = (lax.broadcast_in_dim(x, values.shape, [0]) for x in (high, low))
    operands = [values, *(plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in across)]

    def run(_, *operands: Any) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        ptx = f"{{ .reg .b32 r; mul.{pair} r, $1, $3; fma.rn.{pair} $0, $1, $2, r; }}"
        registers = np.empty_like(operands[0].registers)
        for place, register in np.ndenumerate(operands[0].registers):
            words = [utils.bitcast(operand.registers[place], i32) for operand in operands]
            product = llvm.inline_asm(i32, words, ptx, "=r,r,r,r")
            registers[place] = utils.bitcast(product, register.type)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * 3, return_type=result)(run)(*operands)


def shifted_pairs(
    values: Float[Array, "columns depth"], halves: Sequence[Any]
) -> Float[Array, "columns depth"]:
    """Numbers times the scales of their groups, plus the offsets, rounded once to their type.

    Groups are of 32 inputs. One `ldmatrix` brings each thread the scales and the offsets of two groups, for
    both of its columns: a register has the two groups of a column. In float16 scales and offsets are rounded
    to this type before.

    Arguments:
    - `values`: whole numbers of 4 bits, bfloat16 or float16, in the layout `WGMMA`, of 64 columns.
    - `halves`: of each 32 columns, `[2 * groups, 32]` in shared memory, bfloat16: the scales of all groups of
      a stage, then the offsets.
    """
    kind = jnp.dtype(values.dtype)
    groups = halves[0].shape[0] // 2

    def run(_, values: mgpu.FragmentedArray, *halves: ir.Value) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        ptx = f"fma.rn.{_FORMS[kind][1]} $0, $1, $2, $3;"
        registers = np.empty_like(values.registers)
        at = _named(halves, groups)
        for pair in range(0, groups, 2):
            found = [_in_type(word, kind) for word in _four_matrices(at, pair, halves[0])]
            for which, half in itertools.product(range(2), range(2)):
                scale, offset = (_twice(word, which) for word in found[half::2])
                first = (pair + which) * _STRIPS
                for strip in range(first, first + _STRIPS):
                    place = (0, strip, 0, 0, half, *(0,) * (registers.ndim - 5))
                    word = utils.bitcast(values.registers[place], i32)
                    number = llvm.inline_asm(i32, [word, scale, offset], ptx, "=r,r,r,r")
                    registers[place] = utils.bitcast(number, values.registers[place].type)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=plgpu.Layout.WGMMA)
    refs = (plgpu.RefType(),) * len(halves)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, *refs), return_type=result)(run)(values, *halves)


def named_by_bits(groups: int, stride: int) -> dict[int, int]:
    """How far each bit of a thread's number moves the eight numbers that the thread names to `ldmatrix`.

    The numbers are of the first two groups, of those 32 columns that are the warp's. Of the four matrices two
    have scales, the others offsets, of a warp's first eight columns or of the eight that follow. Of the eight
    rows each second one is of the same group: transposed, a thread has both groups of one column.

    Arguments:
    - `groups`: of a stage.
    - `stride`: numbers from one row of 32 columns to the next.
    """
    return {0: stride, 3: 8, 4: groups * stride, 5: 16}


def _named(halves: Sequence[ir.Value], groups: int) -> ir.Value:
    """The address of what this thread names to `ldmatrix`, for the first two groups."""
    i32 = ir.IntegerType.get_signless(32)
    thread, one = utils.thread_idx(), utils.c(1, i32)
    (stride, _), _ = ir.MemRefType(halves[0].type).get_strides_and_offset()
    first, second = (llvm.ptrtoint(i32, utils.memref_ptr(half)) for half in halves)

    def bit(place: int) -> ir.Value:
        return arith.andi(arith.shrui(thread, utils.c(place, i32)), one)

    address = arith.select(arith.cmpi(arith.CmpIPredicate.eq, bit(6), one), second, first)
    for place, moved in named_by_bits(groups, stride).items():
        address = arith.addi(address, arith.muli(bit(place), utils.c(2 * moved, i32)))
    return address


def _four_matrices(at: ir.Value, group: int, half: ir.Value) -> list[ir.Value]:
    """Scales of a thread's columns, then offsets, each of this group and of the next."""
    i32 = ir.IntegerType.get_signless(32)
    stride = ir.MemRefType(half.type).get_strides_and_offset()[0][0]
    pointer = llvm.inttoptr(llvm.PointerType.get(_SHARED), arith.addi(at, utils.c(2 * stride * group, i32)))
    words = nvvm.ldmatrix(
        pointer,
        layout=nvvm.MMALayout.col,
        num=4,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    return [llvm.extractvalue(i32, words, [place]) for place in range(4)]


def _in_type(word: ir.Value, kind: jnp.dtype) -> ir.Value:
    """Two numbers of bfloat16 in another type of 16 bits."""
    if kind == jnp.bfloat16:
        return word
    ptx = """
    {
    .reg .b32 low, high;
    shl.b32 low, $1, 16;
    and.b32 high, $1, 0xffff0000;
    cvt.rn.f16x2.f32 $0, high, low;
    }
    """
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [word], ptx, "=r,r")


def _twice(word: ir.Value, half: int) -> ir.Value:
    """One half of a word in both."""
    ptx = f"prmt.b32 $0, $1, $1, {0x3232 if half else 0x1010:#x};"
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [word], ptx, "=r,r")


def row_layout(columns: int) -> Any:
    """A layout of rows of numbers of which each thread has eight neighbours: whole rows side by side, so that
    threads that load or store together touch each bank of shared memory once.

    Arguments:
    - `columns`: of a row, 64 or 128.
    """
    threads = columns // _NEIGHBOURS
    rows = _LANES // threads
    tiling = plgpu.Tiling(((_WARPS * rows, columns), (rows, columns), (_NEIGHBOURS,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def widened_rows(
    values: Float8e4m3fn[Array, "rows columns"], dtype: jnp.dtype
) -> Float[Array, "rows columns"]:
    """Floats of 8 bits as wider ones, exactly, each in its place.

    Arguments:
    - `values`: in `row_layout`.
    - `dtype`: bfloat16 or float16, of the result, whose layout is the same.
    """
    base, pair, kind = _FORMS[jnp.dtype(dtype)]
    layout = row_layout(values.shape[1])

    def run(_, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        words = ir.VectorType.get((_NEIGHBOURS // 4,), i32)
        vector = ir.VectorType.get((_NEIGHBOURS,), kind.get())
        registers = np.empty_like(values.registers)
        for place, register in np.ndenumerate(values.registers):
            few = utils.bitcast(register, words)
            pairs = []
            for number in range(_NEIGHBOURS // 4):
                word = llvm.extractelement(few, utils.c(number, i32))
                word = llvm.inline_asm(i32, [word], "prmt.b32 $0, $1, 0, 0x3120;", "=r,r")
                for half in range(2):
                    float_pair = _pair_of_floats(*_SHIFTS[jnp.dtype(dtype)], word, half, base, pair)
                    pairs.append(utils.bitcast(float_pair, ir.VectorType.get((1,), i32)))
            registers[place] = utils.bitcast(utils.vector_concat(pairs), vector)
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(values.shape, dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(run)(values)


def _pairs(
    values: Array,
    dtype: jnp.dtype,
    number: int,
    of_word: Callable[[ir.Value, int, int, str], ir.Value],
    part: int = 0,
    parts: int = 1,
) -> Float[Array, "columns depth_of_part"]:
    """Pairs of floats, of which each word has `number`.

    Arguments:
    - `values`: `[columns, bytes]` in the layout `WGMMA_UPCAST_2X`.
    - `of_word`: makes a pair of a word, by its place in the word, its exponent and its type.
    - `part`, `parts`: which part of the columns of bytes, of so many.
    """
    base, pair, kind = _FORMS[jnp.dtype(dtype)]
    shape = values.shape[0], values.shape[1] * number // (2 * parts)

    def run(_, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        vector = ir.VectorType.get((2,), kind.get())
        width = values.registers.shape[1] // parts
        for index, register in np.ndenumerate(values.registers[:, part * width : (part + 1) * width]):
            word = utils.bitcast(register, i32)
            for which in range(number):
                place = (index[0], number * index[1] + which, *index[2:-1])
                registers[place] = utils.bitcast(of_word(word, which, base, pair), vector)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_UPCAST_2X,), return_type=result)(run)(values)


def _pair_of_bytes(word: ir.Value, half: int, base: int, pair: str) -> ir.Value:
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


def _pair_of_floats(shift: int, factor: int, word: ir.Value, half: int, base: int, pair: str) -> ir.Value:
    """Floats in bytes 0 and 2 of a word as two wider floats, or in bytes 1 and 3."""
    del base
    up = shift - 8 * half
    move = f"shl.b32 n, $1, {up};" if up >= 0 else f"shr.u32 n, $1, {-up};"
    ptx = f"""
    {{
    .reg .b32 s, n, f;
    {move}
    shl.b32 s, $1, {8 * (1 - half)};
    and.b32 n, n, {0x007F007F << shift:#x};
    lop3.b32 n, s, 0x80008000, n, {_AND_OR:#x};
    mov.b32 f, {factor:#x};
    mul.{pair} $0, n, f;
    }}
    """
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [word], ptx, "=r,r")


def _pair_of_nibbles(word: ir.Value, which: int, base: int, pair: str) -> ir.Value:
    """Numbers `which` and `which + 4` of a word as two floats."""
    source, shift = ("s", f"shr.u32 s, $1, {4 * which};") if which else ("$1", "")
    ptx = f"""
    {{
    .reg .b32 s, n;
    {shift}
    lop3.b32 n, {source}, 0x000f000f, {base:#x}, {_AND_OR:#x};
    mov.b32 s, {base | 0x00080008:#x};
    sub.{pair} $0, n, s;
    }}
    """
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [word], ptx, "=r,r")
