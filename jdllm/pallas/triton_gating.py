"""The gate of a feed-forward layer in Triton, as `jdllm.pallas.gating` has it for Hopper."""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def gated(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up of f32 sums, rounded to `DTYPE` as often as in two products and two operations."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    silu = gate / (1 + tl.exp2(gate * -_LOG2_E))
    return (silu.to(DTYPE).to(tl.float32) * up).to(DTYPE)
