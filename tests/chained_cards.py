"""Layers of a few rows as a chain over several cards; `gpu/test_cards.py` runs this.

`python3 -m tests.chained_cards` prints a line of JSON with the number of cards of this machine, then one for
each case on 2 and 4 of them: how many numbers of any run of the chain, on any card, differ from a chain whose
kernels do not overlap; and how far hidden rows are from those of one card, relative to their size.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.shapes import SHAPES
from benchmarks.steps.cached import random_cache
from benchmarks.steps.cards import placed
from jdllm.compiling.executables import Executables
from jdllm.compiling.over_cards import everywhere, part_of_card
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.module import Transformer
from jdllm.execution.paged.forward import forward_reuse
from jdllm.execution.paged.pool import KvArrays
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params

CASES = {
    "every-head": (dataclasses.replace(SHAPES["llada-8b"], num_layers=6), 4000, 32),
    "more-rows": (dataclasses.replace(SHAPES["llada-8b"], num_layers=6), 70, 64),
    "groups-and-biases": (dataclasses.replace(SHAPES["dream-7b"], num_layers=6), 300, 32),
}
REPEATS = 50


def hidden(params, tokens, rows, pool, table, *, config):
    return forward_reuse(params, config, tokens, rows, pool, table)


def operands(params: Params, config: ModelConfig, cached: int, fresh: int) -> tuple[Any, ...]:
    """What `hidden` takes: the same values on any number of cards."""
    k_pool, v_pool, table = random_cache(config, cached, fresh, 64, "bfloat16")
    tokens = jax.random.randint(jax.random.key(2), (fresh,), 0, config.defined_ids)
    unused = jnp.zeros(fresh, jnp.int32)
    rows = Rows(cached + jnp.arange(fresh), unused, unused)
    tokens, rows = jax.tree.map(lambda x: everywhere(x, params), (tokens, rows))
    return params, tokens, rows, KvArrays(k_pool, v_pool), table


def bits(result: jax.Array) -> list[np.ndarray]:
    """What each card has."""
    return [np.asarray(shard.data).view(np.uint16) for shard in result.addressable_shards]


def compared(whole: Params, config: ModelConfig, cached: int, fresh: int, cards: int) -> dict[str, Any]:
    inputs = operands(whole, config, cached, fresh)
    alone = np.asarray(Executables("gpu").compile(hidden, *inputs, config=config)(*inputs), np.float64)
    config = dataclasses.replace(config, cards=cards)
    params = placed(whole, config)
    assert chains(part_of_card(params), config.on_card(), fresh), "these cards make no chain"
    inputs = operands(params, config, cached, fresh)
    one_by_one = bits(Executables("gpu").compile(hidden, *inputs, config=config)(*inputs))[0]
    overlapping = Executables("gpu").compile(hidden, *inputs, config=config, chained=True)
    results = [overlapping(*inputs) for _ in range(REPEATS)]
    found = [own for result in results for own in bits(result)]
    far = np.linalg.norm(np.asarray(results[-1], np.float64) - alone) / np.linalg.norm(alone)
    return {"differing": sum(int((own != one_by_one).sum()) for own in found), "far": float(far)}


def main() -> None:
    print(json.dumps({"cards": len(jax.local_devices())}), flush=True)
    for name, (config, cached, fresh) in CASES.items():
        whole = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16").params()
        for cards in (2, 4):
            if cards <= len(jax.local_devices()):
                found = compared(whole, config, cached, fresh, cards)
                print(json.dumps({"case": name, "on": cards, **found}), flush=True)


if __name__ == "__main__":
    main()
