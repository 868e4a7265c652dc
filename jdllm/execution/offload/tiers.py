"""What lives in host memory when a context is too long for the device, and the bytes that this leaves there.

The rungs of the ladder, each for longer contexts than the one before: the residual stream in host memory;
the keys and values of the running layer too.
"""

import dataclasses

import jax.numpy as jnp

from jdllm.host_memory import IN_FLIGHT
from jdllm.models.config import ModelConfig
from jdllm.models.weights import layer_bytes, layer_stacks

_TILE = 128


@dataclasses.dataclass(frozen=True)
class HostTiers:
    """How a step whose residual stream is in host memory is cut. Hashable: a static choice of the plan.

    - `chunk_rows`: rows that are moved and computed at a time, a multiple of 128. With `kv`, all keys and
      values pass through the device once for every chunk of queries: transfers hide behind attention from
      some 16k rows on.
    - `kv`: keys and values of the running layer are in host memory.
    - `head_groups`: parts of the key-value heads that go through the layer's attention one after another, so
      that the device holds the keys and values of one; it must divide the key-value heads. 1 with `kv`.
    """

    chunk_rows: int
    kv: bool = False
    head_groups: int = 1

    def __post_init__(self):
        if self.chunk_rows < 1 or self.chunk_rows % _TILE:
            raise ValueError(
                f"HostTiers.chunk_rows is {self.chunk_rows}, expected a positive multiple of {_TILE}"
            )
        if self.head_groups < 1 or (self.kv and self.head_groups > 1):
            expected = "1 with kv" if self.kv else "at least 1"
            raise ValueError(f"HostTiers.head_groups is {self.head_groups}, expected {expected}")

    def heads(self, config: ModelConfig) -> tuple[int, int]:
        """Query heads and key-value heads of one group; `ValueError` where the groups do not divide them."""
        if config.num_kv_heads % self.head_groups:
            raise ValueError(
                f"HostTiers.head_groups is {self.head_groups}, which does not divide"
                f" {config.num_kv_heads} key-value heads"
            )
        return config.num_heads // self.head_groups, config.num_kv_heads // self.head_groups

    def bounds(self, rows: int) -> list[tuple[int, int]]:
        """The chunks [start, stop) of `rows`; all but the last have `chunk_rows`."""
        return [(start, min(start + self.chunk_rows, rows)) for start in range(0, rows, self.chunk_rows)]


def device_buffers(
    config: ModelConfig, tiers: HostTiers, rows: int, dtype: jnp.dtype | str
) -> dict[str, int]:
    """Bytes of all arrays that are on the device at the worst moment of a layer.

    Arguments:
    - `config`, `tiers`: the model and how it is cut.
    - `rows`: packed rows.
    - `dtype`: of the weights.

    Returns bytes by name. Not among them: the weights, of which the running layer's are copied, and
    temporaries inside executables. After the last layer there is what `jdllm.decoding.tiered.head_buffers`
    lists.
    """
    size = jnp.dtype(dtype).itemsize
    chunk = min(tiers.chunk_rows, rows)
    heads, kv_heads = tiers.heads(config)
    hidden = chunk * config.hidden_size * size
    outputs = chunk * heads * config.head_dim * size
    buffers = {
        "layer": max(layer_bytes(config, dtype, layers[0]) for layers in layer_stacks(config).values()),
        "positions and key ranges": IN_FLIGHT * 3 * chunk * 4,
        "residual chunks": IN_FLIGHT * hidden,
    }
    if tiers.kv:
        # The last keys for one chunk of queries and the first for the next may be on the device together.
        return buffers | {
            "key and value chunks": IN_FLIGHT * 2 * chunk * kv_heads * config.head_dim * size,
            "queries": 2 * outputs,
            "accumulators": 2 * chunk * heads * (config.head_dim + 2) * 4,
        }
    return buffers | {
        "keys and values": 2 * rows * kv_heads * config.head_dim * size,
        "attention outputs": IN_FLIGHT * tiers.head_groups * outputs,
    }


def host_buffers(config: ModelConfig, tiers: HostTiers, rows: int, dtype: jnp.dtype | str) -> dict[str, int]:
    """Bytes of all arrays that are in pinned host memory at the worst moment.

    A chunk is replaced by a new array before the old one is free, hence some chunks more than the rows have.
    """
    size = jnp.dtype(dtype).itemsize
    chunk = min(tiers.chunk_rows, rows)
    buffers = {"residual": (rows + (IN_FLIGHT - 1) * chunk) * config.hidden_size * size}
    if tiers.kv:
        buffers["keys and values"] = 2 * rows * config.num_kv_heads * config.head_dim * size
    if tiers.head_groups > 1:
        heads, _ = tiers.heads(config)
        buffers["attention outputs"] = rows * (config.num_heads - heads) * config.head_dim * size
    return buffers


def transfer_bytes(
    config: ModelConfig, tiers: HostTiers, rows: int, dtype: jnp.dtype | str
) -> tuple[int, int]:
    """Bytes that one layer moves to the device and to the host where every row sees all rows."""
    size = jnp.dtype(dtype).itemsize
    heads, kv_heads = tiers.heads(config)
    hidden = rows * config.hidden_size * size
    if tiers.kv:
        keys_values = 2 * rows * kv_heads * config.head_dim * size
        return 2 * hidden + len(tiers.bounds(rows)) * keys_values, hidden + keys_values
    outputs = rows * (config.num_heads - heads) * config.head_dim * size
    return 2 * tiers.head_groups * hidden + outputs, hidden + outputs
