"""Sums over cards and rows of all cards by the kernel, on as many cards as there are; `gpu/test_exchange.py`
runs this.

`python3 -m tests.exchanged_sums` prints a line of JSON with the number of cards of this machine, then one for
each case on 2, 4 and 8 of them: how many numbers on any card differ from the sum in f32 by NumPy, rounded
once, or from the rows of all cards.
"""

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdllm.pallas.exchange import addresses_of, rows_of_all_cards, sum_over_cards
from jdllm.pallas.exchange.layout import MAX_ROWS, TURNS

AXIS = "cards"
CASES: list[tuple[int, int, int, Any]] = [
    (8, 4096, 1000, jnp.bfloat16),
    (32, 4096, 50, jnp.bfloat16),
    (1, 3584, 50, jnp.bfloat16),
    (7, 128, 50, jnp.bfloat16),
    (200, 3584, 8, jnp.float16),
    (256, 4096, 8, jnp.bfloat16),
    (256, 8192, 8, jnp.bfloat16),
    (1000, 4096, 6, jnp.bfloat16),
    (8192, 3584, 2, jnp.bfloat16),
    (2500, 640, 6, jnp.float16),
]
"""Rows, columns, sums and type: sums of other sizes follow each other in the same memory. Parts are multiples
of 256 bytes, since XLA gives kernels of Mosaic slices of a stack in place."""

POISON = (256, 8192, TURNS, jnp.bfloat16)
"""As many sums as there are turns of slots; each fills a slot."""


def exchanged(mesh: Mesh, parts: np.ndarray, exchange: Callable[..., jax.Array]) -> np.ndarray:
    """What each card has, `[cards, exchanges, results, columns]`, of a loop over parts.

    Arguments:
    - `parts`: `[cards, exchanges, rows, columns]`.
    - `exchange`: `sum_over_cards` or `rows_of_all_cards`.
    """

    def added(parts: jax.Array, addresses: jax.Array) -> jax.Array:
        def step(_: None, part: jax.Array) -> tuple[None, jax.Array]:
            return None, exchange(part, addresses, AXIS, implementation="mosaic_gpu")

        return lax.scan(step, None, parts[0])[1][None]

    spec = PartitionSpec(AXIS)
    run = jax.jit(jax.shard_map(added, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
    return np.asarray(run(jax.device_put(parts, NamedSharding(mesh, spec)), addresses_of(mesh)))


def differing(mesh: Mesh, rows: int, columns: int, count: int, dtype: Any) -> int:
    """Numbers that differ from NumPy's in any bit, over all cards and sums."""
    shape = (mesh.size, count, rows, columns)
    parts = np.random.default_rng(rows).standard_normal(shape, np.float32).astype(dtype)
    expected = functools.reduce(np.add, parts.astype(np.float32)).astype(dtype)
    found = exchanged(mesh, parts, sum_over_cards)
    return _differing(found, expected)


def misplaced(mesh: Mesh, rows: int, columns: int, count: int, dtype: Any) -> int:
    """Numbers that differ from those of the other cards, over all cards and exchanges."""
    shape = (mesh.size, count, rows, columns)
    parts = np.random.default_rng(rows).standard_normal(shape, np.float32).astype(dtype)
    expected = parts.transpose(1, 0, 2, 3).reshape(count, mesh.size * rows, columns)
    return _differing(exchanged(mesh, parts, rows_of_all_cards), expected)


def _differing(found: np.ndarray, expected: np.ndarray) -> int:
    return sum(int((own.view(np.uint16) != expected.view(np.uint16)).sum()) for own in found)


def main() -> None:
    devices = jax.local_devices()
    print(json.dumps({"cards": len(devices)}), flush=True)
    for cards in (2, 4, 8):
        if cards > len(devices):
            continue
        mesh = Mesh(np.array(devices[:cards]), (AXIS,))
        if addresses_of(mesh) is None:
            raise SystemExit(f"{cards} of these cards cannot exchange: {devices[:cards]}")
        for (rows, columns, count, dtype), count_of in itertools.product(CASES, (differing, misplaced)):
            if cards > 2 and rows > MAX_ROWS and count_of is differing:
                continue
            # What an exchange would read too early, or beyond its part, is no number.
            poisoned_rows, poisoned_columns, halves, poisoned = POISON
            shape = (cards, halves, poisoned_rows, poisoned_columns)
            nowhere = exchanged(mesh, np.full(shape, np.nan, poisoned), sum_over_cards)
            case = {"on": cards, "shape": [rows, columns], "times": count, "type": jnp.dtype(dtype).name}
            case |= {"poisoned": bool(np.isnan(nowhere.astype(np.float32)).all())}
            case |= {"exchange": count_of.__name__, "differing": count_of(mesh, rows, columns, count, dtype)}
            print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
