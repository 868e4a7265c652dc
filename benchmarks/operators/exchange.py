"""Time of a sum over cards of a few rows: the kernel against XLA's collective.

Run as `python3 -m benchmarks exchange [--devices 2] [--rows 32 64 128 256] [--columns 4096]` on a machine
with as many cards. One executable adds again and again, so that sums are launched as in a step. Between two
sums each card multiplies its rows: otherwise XLA would know that all cards have the same, and add nothing.
`kernel_us` and `psum_us` are what a turn takes longer than one without a sum, which takes `none_us`. Each
form's sum is compared with NumPy's first.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.cases import case_parser
from benchmarks.record import compiled, median_seconds, print_row, record
from jdllm.models.cards import AXIS
from jdllm.pallas.exchange import addresses_of, sum_over_cards

TURNS, UNROLLED = 512, 4  # as layers of a step are
REPEATS = 11

Sum = Callable[[jax.Array, jax.Array], jax.Array]
"""From a card's part and its addresses."""


def by_kernel(part: jax.Array, addresses: jax.Array) -> jax.Array:
    return sum_over_cards(part, addresses, AXIS, implementation="mosaic_gpu")


def by_collective(part: jax.Array, addresses: jax.Array) -> jax.Array:
    return sum_over_cards(part, addresses, AXIS, implementation="xla")


def alone(part: jax.Array, addresses: jax.Array) -> jax.Array:
    return part


FORMS: dict[str, Sum] = {"kernel": by_kernel, "psum": by_collective, "none": alone}


def repeated(add: Sum, turns: int) -> Callable[..., jax.Array]:
    """Multiply by a card's own factor and add, `turns` times over."""

    def run(part: jax.Array, factor: jax.Array, addresses: jax.Array) -> jax.Array:
        def turn(_: int, part: jax.Array) -> jax.Array:
            return add(lax.optimization_barrier(part * factor), addresses)

        return lax.fori_loop(0, turns, turn, part, unroll=min(UNROLLED, turns))

    return run


def operands(mesh: Mesh, rows: int, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Parts, factors that keep the size of what is added, and addresses, spread over the cards.

    Raises `SystemExit` for cards that cannot exchange.
    """
    at = NamedSharding(mesh, PartitionSpec(AXIS))
    addresses = addresses_of(mesh)
    if addresses is None:
        raise SystemExit(
            f"{mesh.size} of these devices cannot exchange: the kernel needs Hopper cards of one process that"
            f" reach each other's memory, not {list(mesh.devices.flat)}"
        )
    parts = np.random.default_rng(rows).standard_normal((mesh.size * rows, columns), np.float32)
    factors = np.full((mesh.size, 1), 1 / mesh.size, np.float32)
    put = (jax.device_put(jnp.asarray(x, jnp.bfloat16), at) for x in (parts, factors))
    return *put, addresses


def check(name: str, mesh: Mesh, inputs: tuple[jax.Array, jax.Array, jax.Array]) -> None:
    """Raise `SystemExit` where a form's sum is not NumPy's."""
    parts, factors, _ = inputs
    by_card = np.asarray(parts, np.float32).reshape(mesh.size, -1, parts.shape[1])
    scaled = (by_card * np.asarray(factors, np.float32)[0, 0]).astype(jnp.bfloat16).astype(np.float32)
    expected = scaled.sum(axis=0)
    found = compiled(repeated(FORMS[name], 1), *inputs)(*inputs)
    for shard in found.addressable_shards:
        wrong = np.abs(np.asarray(shard.data, np.float32) - expected).max()
        if not wrong < 0.1:
            raise SystemExit(f"{name}: a sum on {shard.device} differs by {wrong} from NumPy's")


def measured(mesh: Mesh, rows: int, columns: int) -> dict[str, Any]:
    """A row of the table."""
    inputs = operands(mesh, rows, columns)
    for name in ("kernel", "psum"):
        check(name, mesh, inputs)
    runs = {name: compiled(repeated(add, TURNS), *inputs) for name, add in FORMS.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):  # by turns, so that each form meets the same clocks
        for name, run in runs.items():
            times[name].append(median_seconds(lambda run=run: run(*inputs), repeats=1, warm_up=1))
    turn = {name: 1e6 * statistics.median(values) / TURNS for name, values in times.items()}
    return {
        "devices": mesh.size,
        "rows": rows,
        "kernel_us": turn["kernel"] - turn["none"],
        "psum_us": turn["psum"] - turn["none"],
        "none_us": turn["none"],
        "times": (turn["psum"] - turn["none"]) / (turn["kernel"] - turn["none"]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("exchange", __doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--columns", type=int, default=4096)
    args = parser.parse_args(arguments)
    devices = jax.local_devices()
    if max(args.devices) > len(devices) or min(args.devices) < 2:
        asked = " ".join(map(str, args.devices))
        parser.error(f"--devices is {asked}: sums need two devices, and this machine has {len(devices)}")
    table = []
    for cards in args.devices:
        mesh = Mesh(np.array(devices[:cards]), (AXIS,))
        for rows in args.rows:
            table.append(measured(mesh, rows, args.columns))
            print_row(table[-1])
    record("exchange", table, args.out, columns=args.columns, turns=TURNS, repeats=REPEATS)
