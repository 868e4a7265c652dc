"""XLA compiles for every card that is described."""

import jax
import jax.numpy as jnp
import pytest

from jdllm.planning.aot import capability_of, compile_for, target_sharding
from jdllm.planning.descriptions import described_targets

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("target", described_targets())
def test_a_product_and_a_fusion(target: str):
    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ w)

    x, w = (jax.ShapeDtypeStruct(sizes, jnp.bfloat16) for sizes in ((512, 1024), (1024, 256)))
    text = compile_for(target, gated, x, w).as_text() or ""
    assert "__cublas$lt$matmul" in text
    assert "kind=kLoop" in text
    (device,) = target_sharding(target).device_set
    assert tuple(map(int, device.compute_capability.split("."))) == capability_of(target)
