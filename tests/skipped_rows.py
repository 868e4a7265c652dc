"""Kernels of which some warpgroups have no rows, again and again; `gpu/test_skipped_rows.py` runs this.

`python3 -m tests.skipped_rows` prints a line of JSON for each kernel: how often it ran, and how many results
differ from those of a launch in which every warpgroup has rows. A kernel whose warps lose each other never
ends, some time after the first hundred launches.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.masked_logits import Level, masked_logits
from tests.pallas.masked_rows import asked

LAUNCHES = 1500
ROWS, COLUMNS, IDS = 1024, 3584, 152064  # the head of Dream-7B
GROUPS, INNER, OUTER = 64, 2048, 1024  # the experts of LLaDA-MoE
SLOTS = 8 * 1024


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / 64)()


def head_rows() -> int:
    """Rows that decide otherwise where others are skipped."""
    hidden, head = draw(0, ROWS, COLUMNS), draw(1, IDS, COLUMNS)
    rows = asked(ROWS, vocab=IDS)

    def decide(count: Any) -> Any:
        return masked_logits(hidden, head, rows, Level.MOMENTS, count=count, implementation="mosaic_gpu")

    def differing(counts: jax.Array) -> jax.Array:
        whole = decide(jnp.int32(ROWS)).token

        def step(total: jax.Array, count: jax.Array) -> tuple[jax.Array, None]:
            wrong = (decide(count).token != whole) & (jnp.arange(ROWS) < count)
            return total + wrong.sum(), None

        return lax.scan(step, jnp.int32(0), counts)[0]

    counts = np.random.default_rng(0).integers(1, ROWS // 32, LAUNCHES, endpoint=True) * 32
    return int(jax.jit(differing)(counts.astype(np.int32)))


def products() -> int:
    """Products that differ where groups end inside the rows of a block from those of one group."""
    x, weights = draw(2, SLOTS, INNER), draw(3, 1, INNER, OUTER)
    same = jnp.broadcast_to(weights, (GROUPS, INNER, OUTER))

    def differing(sizes: jax.Array) -> jax.Array:
        whole = grouped_matmul(x, weights, jnp.array([SLOTS], jnp.int32), implementation="mosaic_gpu")

        def step(total: jax.Array, sizes: jax.Array) -> tuple[jax.Array, None]:
            return total + (grouped_matmul(x, same, sizes, implementation="mosaic_gpu") != whole).sum(), None

        return lax.scan(step, jnp.int32(0), sizes)[0]

    drawn = np.random.default_rng(1)
    sizes = np.stack([drawn.multinomial(SLOTS, drawn.dirichlet(np.ones(GROUPS))) for _ in range(LAUNCHES)])
    return int(jax.jit(differing)(sizes.astype(np.int32)))


def main() -> None:
    for kernel in (head_rows, products):
        told = {"kernel": kernel.__name__, "launches": LAUNCHES, "differing": kernel()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
