"""Evaluation with the residual stream or keys and values in host memory: errors, or time a layer.

Run on a card, whose memory XLA_PYTHON_CLIENT_MEM_FRACTION limits, as
`python3 -m benchmarks tiers --check --rows 32768 --layers 4`, or
`python3 -m benchmarks tiers --rows 1048576 --layers 1 --tier residual --groups 4 --memory-gib 24`.
The weights of all layers are drawn; `--layers` are evaluated.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import median_seconds, record
from benchmarks.shapes import SHAPES
from benchmarks.steps.full import attention_form
from jdllm.compiling.executable import donated_places
from jdllm.compiling.executables import Executables
from jdllm.execution.offload.forward import forward_tiered
from jdllm.execution.offload.parts import take_layer
from jdllm.execution.offload.tiers import HostTiers, device_buffers, host_buffers, transfer_bytes
from jdllm.execution.transformer import forward
from jdllm.host_memory import to_device, to_host
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, is_spec, layer_stacks, param_bytes, spec_tree

DTYPE = jnp.bfloat16
GIB = 2**30
Row = dict[str, float | int | str]


@functools.partial(jax.jit, static_argnames=("shape", "std"))
def draw(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    return jnp.ones(shape, DTYPE) if std == 0 else jax.random.normal(key, shape, DTYPE) * DTYPE(std)


@functools.partial(jax.jit, static_argnames=("shape", "std"))
def draw_stack(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Layer by layer: the temporaries are those of one."""
    return jax.lax.map(lambda k: draw(k, shape[1:], std), jax.random.split(key, shape[0]))


def random_params(config: ModelConfig) -> Params:
    """Random weights on the device."""
    specs: dict[str, Any] = spec_tree(config)
    keys = (jax.random.key(i) for i in itertools.count())
    params: Params = {
        name: draw(next(keys), spec.shape, spec.init_std) for name, spec in specs.items() if is_spec(spec)
    }
    for name in layer_stacks(config):
        leaves = specs[name].items()
        params[name] = {leaf: draw_stack(next(keys), s.shape, s.init_std) for leaf, s in leaves}
    return jax.block_until_ready(params)


def sequence(config: ModelConfig, rows: int) -> tuple[np.ndarray, Rows]:
    """One sequence whose rows see all rows."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, rows).astype(np.int32)
    return tokens, Rows(
        np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32), np.full(rows, rows, np.int32)
    )


def check(config: ModelConfig, rows: int, chunk_rows: int, groups: int) -> list[Row]:
    """Errors of hidden rows against `forward` on the same weights, in units of the rows' root mean square."""
    params = random_params(config)
    tokens, packed = sequence(config, rows)
    executables = Executables(jax.devices()[0].platform)
    whole = executables.call(_forward, params, tokens, packed, config=config)
    expected = np.asarray(whole).astype(np.float32)
    del whole
    scale = np.sqrt(np.mean(expected**2, axis=1, keepdims=True))
    tiers = {
        "residual": HostTiers(chunk_rows, head_groups=groups),
        "kv": HostTiers(chunk_rows, kv=True),
    }
    table: list[Row] = []
    for name, tier in tiers.items():
        chunks = forward_tiered(params, config, tokens, packed, tiers=tier, call=executables.call)
        actual = np.concatenate([np.asarray(c).astype(np.float32) for c in chunks])
        error = np.abs(actual - expected) / scale
        table.append(
            {
                "tier": name,
                "rows": rows,
                "layers": config.num_layers,
                "largest_error": float(error.max()),
                "mean_error": float(error.mean()),
            }
        )
    return table


def _forward(params: Params, tokens: jax.Array, rows: Rows, *, config: ModelConfig) -> jax.Array:
    return forward(params, config, tokens, rows)


class Recorder:
    """Runs executables and remembers which, so that their time without any transfers can be measured."""

    def __init__(self):
        self.executables = Executables(jax.devices()[0].platform)
        self._counts: collections.Counter[Any] = collections.Counter()
        self._examples: dict[Any, tuple[Any, tuple[Any, ...], tuple[str, ...], dict[str, Any]]] = {}

    def call(self, function: Any, *args: Any, donate: tuple[str, ...] = (), **static: Any) -> Any:
        key = (function, tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args)))
        self._counts[key] += 1
        if key not in self._examples:
            # Of the stacks of all layers there is no room for a copy.
            example = args if function is take_layer else jax.tree.map(_example, args)
            self._examples[key] = (function, example, donate, static)
        return self.executables.call(function, *args, donate=donate, **static)

    def forget(self) -> None:
        self._counts.clear()
        self._examples.clear()

    def seconds(self) -> float:
        """Time of all calls with their arguments on the device: each executable's median, times its calls."""
        return sum(self._median(*self._examples[key]) * count for key, count in self._counts.items())

    def _median(
        self, function: Any, args: tuple[Any, ...], donate: tuple[str, ...], static: dict[str, Any]
    ) -> float:
        filled = [jax.tree.map(_filled, arg) for arg in args]
        times = []
        for _ in range(4):
            for place in donated_places(function, donate):
                filled[place] = None  # the last run's, before memory is taken for this one's
                filled[place] = jax.block_until_ready(jax.tree.map(_filled, args[place]))
            start = time.perf_counter()
            out = jax.block_until_ready(self.executables.call(function, *filled, donate=donate, **static))
            times.append(time.perf_counter() - start)
            del out
        return statistics.median(times[1:])


def _example(leaf: Any) -> Any:
    """Integers as they are, of anything else the shape."""
    is_int = np.issubdtype(leaf.dtype, np.integer)
    return np.asarray(leaf) if is_int else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _filled(leaf: Any) -> jax.Array:
    """Random values in place of a shape, repeated so that large arrays need no larger temporaries."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return to_device(leaf, jax.devices()[0])
    block = draw(jax.random.key(0), (min(leaf.shape[0], 4096), *leaf.shape[1:]), 0.02).astype(leaf.dtype)
    return jnp.take(block, jnp.arange(leaf.shape[0]) % len(block), axis=0)


def transfer_rates(size: int = 256 << 20) -> tuple[float, float]:
    """Bytes/s from pinned host memory to the device and back."""
    device = jax.devices()[0]
    there = jax.block_until_ready(jnp.ones(size, jnp.uint8))
    here = jax.block_until_ready(to_host(there, device))
    seconds = [
        median_seconds(lambda: to_device(here, device)),
        median_seconds(lambda: to_host(there, device)),
    ]
    return size / seconds[0], size / seconds[1]


def measure(shape: str, rows: int, layers: int, name: str, tiers: HostTiers) -> Row:
    """Time and memory of the first `layers` layers of the model, the embedding included."""
    model = SHAPES[shape]
    config = dataclasses.replace(model, num_layers=layers)
    params = random_params(model)
    tokens, packed = sequence(config, rows)
    recorder = Recorder()
    run = functools.partial(forward_tiered, params, config, tokens, tiers=tiers, call=recorder.call)
    # Rows that see nothing leave attention out: all executables get compiled, and host memory is taken.
    run(packed._replace(k_end=packed.k_start))
    recorder.forget()
    start = time.perf_counter()
    run(packed)
    seconds = (time.perf_counter() - start) / layers
    peak = _memory("peak_bytes_in_use")
    compute = recorder.seconds() / layers
    rates, moved = transfer_rates(), transfer_bytes(config, tiers, rows, DTYPE)
    flops = 4 * rows * rows * config.num_heads * config.head_dim
    resident = param_bytes(model, DTYPE)
    return {
        "tier": name,
        "rows": rows,
        "layers": layers,
        "groups": tiers.head_groups,
        "chunk_rows": tiers.chunk_rows,
        "attention": attention_form(config),
        "layer_s": seconds,
        "attention_tflops": flops / seconds / 1e12,
        "compute_alone_s": compute,
        "compute_share": compute / seconds,
        "to_device_gib": moved[0] / GIB,
        "to_host_gib": moved[1] / GIB,
        "to_device_alone_s": moved[0] / rates[0],
        "to_host_alone_s": moved[1] / rates[1],
        "peak_gib": peak / GIB,
        "listed_gib": (resident + sum(device_buffers(config, tiers, rows, DTYPE).values())) / GIB,
        "host_gib": sum(host_buffers(model, tiers, rows, DTYPE).values()) / GIB,
        "limit_gib": _memory("bytes_limit") / GIB,
    }


def _memory(name: str) -> float:
    """A memory statistic of the device; not a number where there are none."""
    return (jax.devices()[0].memory_stats() or {}).get(name, float("nan"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks tiers", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--check", action="store_true", help="compare with the whole model")
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tier", choices=("residual", "kv"), default="residual")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--chunk-rows", type=int, default=4096)
    parser.add_argument("--memory-gib", type=float, help="refuse to run with a larger limit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    limit = _memory("bytes_limit") / GIB
    print(f"bytes_limit: {limit:.2f} GiB")
    if args.memory_gib is not None and limit > args.memory_gib:
        parser.error(f"the limit is {limit:.2f} GiB: lower XLA_PYTHON_CLIENT_MEM_FRACTION")
    if args.check:
        config = dataclasses.replace(SHAPES[args.shape], num_layers=args.layers)
        record(f"tiers_check_{args.shape}", check(config, args.rows, args.chunk_rows, args.groups), args.out)
        return
    tiers = HostTiers(
        args.chunk_rows,
        kv=args.tier == "kv",
        head_groups=args.groups if args.tier == "residual" else 1,
    )
    row = measure(args.shape, args.rows, args.layers, args.tier, tiers)
    record(f"tiers_{args.shape}_{args.tier}_{args.rows}", [row], args.out)


if __name__ == "__main__":
    main()
