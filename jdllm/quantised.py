"""Matrices that are kept in few bits on the device."""

import dataclasses
from typing import ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Float32, Int, Int8, UInt8

from jdllm.rounding import GROUP, SHIFTED_GROUP, rounded_in_groups, rounded_with_offsets

WeightForm = Literal["int8", "int4", "uint4", "fp8"]
"""Bits of a number, and its kind. "uint4" is the field's name for numbers of 4 bits with zero points."""

FLOAT8 = jnp.float8_e4m3fn
"""Floats of 8 bits with three bits of mantissa (E4M3)."""

MOST_FLOAT8 = float(jnp.finfo(FLOAT8).max)

_PACKED = (3, 2, 4, 0, 1)
"""The order of thirty-two numbers in `packed`, by the bits of their places."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A matrix in 8 bits, or matrices of many layers: row `o` is `values[o] * scales[o]`.

    - `values`: one row for each output, whose inputs are in the order of `out_of_order`.
    - `scales`: of each row.
    """

    values: Int8[Array, "*stack outputs inputs"]
    scales: Float32[Array, "*stack outputs"]

    bits: ClassVar[int] = 8
    """Of a number."""

    group: ClassVar[int | None] = None
    """Inputs that share a scale; `None` for all of a row."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @classmethod
    def of(cls, matrix: Float[Array, "*stack outputs inputs"]) -> "Quantised":
        """A matrix that is `rounded`."""
        return cls.of_stored(*cls.stored(matrix))

    @staticmethod
    def stored(matrix: Float[Array, "*stack outputs inputs"]) -> tuple[Array, ...]:
        """What files have of a matrix: numbers whose inputs are in order, scales, and perhaps offsets."""
        return rounded(matrix)

    @staticmethod
    def stored_values(values: Int8[Array, "*stack outputs inputs"]) -> Array:
        """What files have of rounded numbers whose inputs are in order."""
        return values

    @classmethod
    def of_stored(
        cls, values: Int8[Array, "*stack outputs inputs"], scales: Float32[Array, "*stack outputs"]
    ) -> "Quantised":
        """A matrix of what `stored` returns."""
        return cls(out_of_order(values), scales)

    @staticmethod
    def stored_order(x: Float[Array, "rows inputs"]) -> Float[Array, "rows inputs"]:
        """Rows whose inputs are in the order of `values`: products of both are those of inputs in order."""
        return out_of_order(x)

    def of_layer(self, place: Int[Array, ""] | int) -> Self:
        """The matrix of the layer at a place of a stack."""
        return jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, place, keepdims=False), self)

    def some_outputs(self, start: Int[Array, ""] | int, size: int) -> Self:
        """`size` neighbouring rows, from `start` on."""
        values = lax.dynamic_slice_in_dim(self.values, start, size, axis=-2)
        scales = lax.dynamic_slice_in_dim(self.scales, start, size, axis=-1)
        return dataclasses.replace(self, values=values, scales=scales)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*stack outputs inputs"]:
        """The matrix in a type that XLA's products take."""
        values = in_order(self.values).astype(jnp.float32)
        return (values * self.scales[..., None]).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped(Quantised):
    """A matrix in 4 bits, or matrices of many layers, with a scale for each 128 inputs of a row.

    - `values`: one row for each output, `packed`.
    - `scales`: of each group of inputs, those of all rows side by side, so that a kernel copies the scales of
      neighbouring rows at once.
    """

    values: UInt8[Array, "*stack outputs half_inputs"]
    scales: Float32[Array, "*stack groups outputs"]

    bits: ClassVar[int] = 4
    group: ClassVar[int | None] = GROUP

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, half = self.values.shape
        return *stack, 2 * half

    @staticmethod
    def stored(matrix: Float[Array, "*stack outputs inputs"]) -> tuple[Array, Array]:
        """What files have of a matrix of an even number of inputs that is `rounded_in_groups`."""
        values, scales = rounded_in_groups(matrix)
        return paired(values), scales

    @staticmethod
    def stored_values(values: Int8[Array, "*stack outputs inputs"]) -> Array:
        """What files have of rounded numbers whose inputs are in order."""
        return paired(values)

    @classmethod
    def of_stored(
        cls,
        values: UInt8[Array, "*stack outputs half_inputs"],
        scales: Float32[Array, "*stack outputs groups"],
    ) -> "Grouped":
        """A matrix of what `stored` returns."""
        return cls(packed(unpaired(values)), jnp.swapaxes(scales, -1, -2))

    @staticmethod
    def stored_order(x: Float[Array, "rows inputs"]) -> Float[Array, "rows inputs"]:
        """Rows whose inputs are in the order of `values`, for each byte that of the lower bits first."""
        return _permuted(x, _PACKED)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*stack outputs inputs"]:
        """The matrix in a type that XLA's products take."""
        values = unpacked(self.values).astype(jnp.float32)
        scales = jnp.repeat(jnp.swapaxes(self.scales, -1, -2), GROUP, axis=-1)
        return (values * scales[..., : values.shape[-1]]).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shifted(Grouped):
    """A matrix in 4 bits, or matrices of many layers, with a scale and an offset for each 32 inputs of a row.

    The number `v` of a group, -8 to 7, stands for `v * scale + offset`. Published files whose groups have a
    zero point or a minimum (AWQ, GPTQ, GGUF) are matrices of this kind.

    - `scales`, `offsets`: of each group of inputs, those of all rows side by side, in 16 bits: a group has
      sixteen bytes of numbers, and floats of 32 bits would add half as many.
    """

    scales: BFloat16[Array, "*stack groups outputs"]
    offsets: BFloat16[Array, "*stack groups outputs"]

    group: ClassVar[int | None] = SHIFTED_GROUP

    @staticmethod
    def stored(matrix: Float[Array, "*stack outputs inputs"]) -> tuple[Array, Array, Array]:
        """What files have of a matrix that is `rounded_with_offsets`."""
        values, *by_groups = rounded_with_offsets(matrix)
        scales, offsets = (each.astype(jnp.bfloat16) for each in by_groups)
        return paired(values), scales, offsets

    @classmethod
    def of_stored(
        cls,
        values: UInt8[Array, "*stack outputs half_inputs"],
        scales: BFloat16[Array, "*stack outputs groups"],
        offsets: BFloat16[Array, "*stack outputs groups"],
    ) -> "Shifted":
        """A matrix of what `stored` returns."""
        return cls.of_numbers(unpaired(values), scales, offsets)

    @classmethod
    def of_numbers(
        cls,
        values: Int8[Array, "*stack outputs inputs"],
        scales: Float[Array, "*stack outputs groups"],
        offsets: Float[Array, "*stack outputs groups"],
    ) -> "Shifted":
        """A matrix of numbers whose inputs, a multiple of 32, are in order."""
        by_groups = (jnp.swapaxes(each, -1, -2).astype(jnp.bfloat16) for each in (scales, offsets))
        return cls(packed(values), *by_groups)

    def some_outputs(self, start: Int[Array, ""] | int, size: int) -> Self:
        """`size` neighbouring rows, from `start` on."""
        some = super().some_outputs(start, size)
        return dataclasses.replace(some, offsets=lax.dynamic_slice_in_dim(self.offsets, start, size, axis=-1))

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*stack outputs inputs"]:
        """The matrix in a type that XLA's products take."""
        values = unpacked(self.values).astype(jnp.float32)
        scales, offsets = (
            jnp.repeat(jnp.swapaxes(each, -1, -2).astype(jnp.float32), SHIFTED_GROUP, axis=-1)
            for each in (self.scales, self.offsets)
        )
        return (values * scales + offsets).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float8(Quantised):
    """A matrix of floats of 8 bits, or matrices of many layers: row `o` is `values[o] * scales[o]`.

    The tensor cores multiply floats of 8 bits with floats of 8 bits, at twice the rate of 16 bits.
    """

    values: Float8e4m3fn[Array, "*stack outputs inputs"]

    @staticmethod
    def stored(matrix: Float[Array, "*stack outputs inputs"]) -> tuple[Array, Array]:
        """What files have of a matrix that is `rounded_to_float8`."""
        return rounded_to_float8(matrix)

    def product(self, x: Float[Array, "rows inputs"]) -> Float[Array, "rows outputs"]:
        """Products with rows that are `rounded_to_float8`, in the dtype of the rows. Sums are f32."""
        rows, scales = rounded_to_float8(x)
        contract = (((1,), (1,)), ((), ()))
        # Inputs of both are in the order in which kernels load weights: sums do not mind. Before they are
        # scaled, sums may be too large for float16.
        kind = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
        y = lax.dot_general(
            self.stored_order(rows),
            self.values,
            contract,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=kind,
        )
        return (y.astype(jnp.float32) * scales[:, None] * self.scales).astype(x.dtype)


KINDS: dict[WeightForm, type[Quantised]] = {
    "int8": Quantised,
    "int4": Grouped,
    "uint4": Shifted,
    "fp8": Float8,
}
"""The leaf of each form."""


def rounded(
    matrix: Float[Array, "*stack outputs inputs"],
) -> tuple[Int8[Array, "*stack outputs inputs"], Float32[Array, "*stack outputs"]]:
    """Numbers of 8 bits, whose inputs are in order, and the scale of each row.

    They are rounded to nearest, so that the largest number of a row becomes 127 or -127.
    """
    matrix = matrix.astype(jnp.float32)
    scales = jnp.max(jnp.abs(matrix), axis=-1) / 127
    values = jnp.round(matrix / jnp.where(scales > 0, scales, 1)[..., None])
    return values.astype(jnp.int8), scales


def rounded_to_float8(
    matrix: Float[Array, "*stack outputs inputs"],
) -> tuple[Float8e4m3fn[Array, "*stack outputs inputs"], Float32[Array, "*stack outputs"]]:
    """Floats of 8 bits, whose inputs are in order, and the scale of each row.

    They are rounded to nearest, so that the largest number of a row becomes 448 or -448.
    """
    matrix = matrix.astype(jnp.float32)
    scales = jnp.max(jnp.abs(matrix), axis=-1) / MOST_FLOAT8
    values = jnp.clip(matrix / jnp.where(scales > 0, scales, 1)[..., None], -MOST_FLOAT8, MOST_FLOAT8)
    return values.astype(FLOAT8), scales


def packed(values: Int8[Array, "*stack inputs"]) -> UInt8[Array, "*stack half_inputs"]:
    """Numbers of 4 bits, two to a byte, in the order in which kernels load them (`jdllm.pallas.widening`).

    Four bytes are a word of eight numbers. Its number `i` and its number `i + 4` are neighbours among the
    inputs, and each thirty-two inputs are four words. The first word has the inputs 0, 8, 16, 24, 1, 9, 17
    and 25. The other words have those that are four, two and six higher. Inputs that are no multiple of 32
    stay in order: no kernel takes them.
    """
    return paired(_permuted(values, _PACKED))


def unpacked(values: UInt8[Array, "*stack half_inputs"]) -> Int8[Array, "*stack inputs"]:
    """Undo `packed`."""
    return _permuted(unpaired(values), (3, 4, 1, 0, 2))


def paired(values: Int8[Array, "*stack numbers"]) -> UInt8[Array, "*stack half_numbers"]:
    """Numbers of 4 bits plus 8, two neighbours to a byte, the first one in the lower bits."""
    first, second = (values[..., begin::2].astype(jnp.uint8) + 8 for begin in range(2))
    return first | (second << 4)


def unpaired(values: UInt8[Array, "*stack half_numbers"]) -> Int8[Array, "*stack numbers"]:
    """Undo `paired`."""
    *stack, half = values.shape
    shifts = 4 * lax.broadcasted_iota(jnp.uint8, (*values.shape, 2), values.ndim)
    both = (values[..., None] >> shifts) & 15
    return both.astype(jnp.int8).reshape(*stack, 2 * half) - 8


def out_of_order(values: Int8[Array, "*stack inputs"]) -> Int8[Array, "*stack inputs"]:
    """Numbers in the order in which kernels load them (`jdllm.pallas.widening`).

    Each sixteen are 0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15. Inputs that are no multiple of 16
    stay as they are: no kernel takes them.
    """
    return _permuted(values, (2, 1, 3, 0))


def in_order(values: Int8[Array, "*stack inputs"]) -> Int8[Array, "*stack inputs"]:
    """Undo `out_of_order`."""
    return _permuted(values, (3, 1, 0, 2))


def _permuted(values: Array, bits: tuple[int, ...]) -> Array:
    """Permute the last axis: the bits of a place among as many as these bits count, the highest bit first."""
    *stack, inputs = values.shape
    if inputs % 2 ** len(bits):
        return values
    before = len(stack) + 1
    by_bits = values.reshape(*stack, inputs // 2 ** len(bits), *(2 for _ in bits))
    return by_bits.transpose(*range(before), *(before + bit for bit in bits)).reshape(values.shape)
