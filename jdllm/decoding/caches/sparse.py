"""Sparse-dLLM."""

from jdllm.decoding.caches.dual import Dual

# The rows outside the block that its queries attend to most, the same for all heads.
POLICY = Dual(
    "sparse",
    "outside the block the share `retention` that the block attends to most (Sparse-dLLM)",
    delay=1,
    scored=True,
)
