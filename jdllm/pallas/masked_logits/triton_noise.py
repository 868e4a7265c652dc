"""The noise of `jdllm.noise` inside kernels of Triton."""

# Called from Python a kernel's function raises: that is all that its type says.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from jdllm import noise
from jdllm.pallas.masked_logits import gumbel as polynomial

_EVEN, _ODD = (tl.constexpr(rotations) for rotations in noise.ROTATIONS)
_PARITY = tl.constexpr(noise.PARITY)
_Q = tl.constexpr(polynomial.COEFFICIENTS)
_TERMS = tl.constexpr(len(polynomial.COEFFICIENTS))
_TWO_THIRDS = tl.constexpr(polynomial.TWO_THIRDS)
_EXPONENT_ONE = tl.constexpr(polynomial.EXPONENT_ONE)
_LN_2 = tl.constexpr(0.6931471805599453 / polynomial.EXPONENT_ONE)


@triton.jit
def threefry(key_0, key_1, counter_0, counter_1):
    """Two random words, as `jdllm.noise.threefry` draws them; uint32, broadcast together."""
    key_2 = key_0 ^ key_1 ^ _PARITY
    x0, x1 = counter_0 + key_0, counter_1 + key_1
    x0, x1 = _rounds(x0, x1, _EVEN)
    x0, x1 = x0 + key_1, x1 + key_2 + 1
    x0, x1 = _rounds(x0, x1, _ODD)
    x0, x1 = x0 + key_2, x1 + key_0 + 2
    x0, x1 = _rounds(x0, x1, _EVEN)
    x0, x1 = x0 + key_0, x1 + key_1 + 3
    x0, x1 = _rounds(x0, x1, _ODD)
    x0, x1 = x0 + key_1, x1 + key_2 + 4
    x0, x1 = _rounds(x0, x1, _EVEN)
    return x0 + key_2, x1 + key_0 + 5


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise, as `jdllm.pallas.masked_logits.gumbel` makes it from the same bits."""
    upper = bits >= 0x80000000
    near = tl.where(upper, bits ^ 0xFFFFFFFF, bits)
    fraction = near.to(tl.float32) * 2.0**-32 + 2.0**-33
    r, exponent = _reduced(fraction)
    far = fraction > 1 / 3
    r = tl.where(upper, tl.where(far, 1 - 2 * fraction, -fraction), r)
    exponent = tl.where(upper, tl.where(far, -1.0 * _EXPONENT_ONE, 0.0), exponent)
    r, exponent = _reduced(-_log(r, exponent))
    return -_log(r, exponent)


@triton.jit
def _rounds(x0, x1, ROTATIONS: tl.constexpr):
    for i in tl.static_range(4):
        x0 += x1
        x1 = x0 ^ ((x1 << ROTATIONS[i]) | (x1 >> (32 - ROTATIONS[i])))
    return x0, x1


@triton.jit
def _reduced(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _TWO_THIRDS) & -_EXPONENT_ONE
    mantissa = (bits - exponent).to(tl.float32, bitcast=True)
    return mantissa - 1, exponent.to(tl.float32)


@triton.jit
def _log(r, exponent):
    q = r * _Q[_TERMS - 1] + _Q[_TERMS - 2]
    for term in tl.static_range(3, _TERMS + 1):
        q = q * r + _Q[_TERMS - term]
    return exponent * _LN_2 + (r * r * q + r)
