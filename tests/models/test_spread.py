"""Where weights lie on several cards, and what comes beside them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.shapes import SHAPES
from jdllm.models.cards import ADDRESSES, AXIS
from jdllm.models.spread import card_bytes, in_parts

AT = NamedSharding(Mesh(np.array(jax.devices("cpu")[:1]), (AXIS,)), PartitionSpec())
WEIGHTS = {"final_norm": jax.ShapeDtypeStruct((64,), jnp.bfloat16, sharding=AT)}


def test_memory_for_exchanges_counts_on_each_card():
    """For each of three cards four slots of 4 MiB and two of 64 rows of 32 KiB; 256 lines of 128 bytes."""
    addresses = jax.ShapeDtypeStruct((3, 8), jnp.int32, sharding=AT)
    assert card_bytes(WEIGHTS) == 2 * 64
    added = card_bytes(WEIGHTS | {ADDRESSES: addresses}) - card_bytes(WEIGHTS)
    assert added == 3 * (4 * 4 + 2 * 2) * 2**20 + 256 * 128 + 4 * 3 * 8


def test_devices_that_cannot_exchange_get_weights_alone():
    config = dataclasses.replace(SHAPES["llada-8b"], cards=2)
    assert set(in_parts(WEIGHTS, config)) == {"final_norm"}
    whole = {"final_norm": jax.device_put(jnp.ones(64, jnp.bfloat16), AT)}
    assert set(in_parts(whole, config)) == {"final_norm"}
