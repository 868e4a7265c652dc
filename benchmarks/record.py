"""Timing, ceilings and result files shared by all benchmarks."""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdllm.compiling.executables import Executables
from jdllm.pallas.device import Kernels

RESULTS = Path(__file__).parent / "results"

BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 700e12
"""The floor of an operator is at these rates, whatever the run reaches."""

_QUEUED_SECONDS, _LONG_SECONDS = 0.05, 1.0
SETTLING_SECONDS, SUSTAINED_SECONDS = 0.5, 2.0
"""How long a function is called before its time is taken, and while its time is taken."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the card reaches in this run: bf16 matrix products in FLOP/s, device copies in bytes/s."""

    flops: float
    bytes: float


def waited_seconds(run: Callable[[], Any], repeats: int = 5, warm_up: int = 2) -> float:
    """Median time of a call of `run`, which returns arrays, until these are there."""
    for _ in range(warm_up):
        seconds_of(run, 1)
    return statistics.median(seconds_of(run, 1) for _ in range(repeats))


def median_seconds(run: Callable[[], Any], repeats: int = 5, warm_up: int = 2) -> float:
    """Median time that the device takes for a call of `run`, which returns arrays.

    It is what further calls take behind a first one. On a card 1 to 2 ms pass besides until the first one has
    started and the host knows of the last one's end; where a call takes a second they count.
    """
    alone = waited_seconds(run, 1, warm_up)
    if alone >= _LONG_SECONDS:
        return waited_seconds(run, repeats, warm_up=0)
    further = math.ceil(_QUEUED_SECONDS / alone)
    times = [(seconds_of(run, 1 + further) - seconds_of(run, 1)) / further for _ in range(repeats)]
    return statistics.median(times)


def seconds_of(run: Callable[[], Any], calls: int) -> float:
    """Time of so many calls of `run`, one behind the other, until the last one's arrays are there."""
    start = time.perf_counter()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    return time.perf_counter() - start


class Sustained(NamedTuple):
    """What a call takes that is repeated for seconds, and the first card's state meanwhile.

    - `seconds`: of one call.
    - `state`: `sm_mhz` and `watts`, means of what nvidia-smi says; empty where it cannot say.
    """

    seconds: float
    state: dict[str, float]


def sustained(run: Callable[[], Any]) -> Sustained:
    """Repeat `run`, which returns arrays; for a moment only where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Sustained(_repeat(run, 0.0), {})
    _repeat(run, SETTLING_SECONDS)
    query = [program, "-i", "0", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader"]
    with subprocess.Popen([*query, "-lms", "100"], stdout=subprocess.PIPE, text=True) as process:
        seconds = _repeat(run, SUSTAINED_SECONDS)
        process.terminate()
        said, _ = process.communicate()
    samples = [(float(mhz), float(watts)) for mhz, watts in re.findall(r"(\d+) MHz, ([\d.]+) W", said)]
    means = [statistics.fmean(values) for values in zip(*samples, strict=True)]
    return Sustained(seconds, dict(zip(("sm_mhz", "watts"), means, strict=False)))


def _repeat(run: Callable[[], Any], seconds: float) -> float:
    """Call `run` for so long, each time before the last call has ended; the seconds of a call."""
    start, calls, last = time.perf_counter(), 1, run()
    while time.perf_counter() - start < seconds:
        before, last, calls = last, run(), calls + 1
        jax.block_until_ready(before)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / calls


def compiled(
    function: Callable[..., Any], *args: Any, chained: bool = False, kernels: Kernels = "auto", **static: Any
) -> Any:
    """The executable of `function(*args, **static)`, with the options of jdllm's executables."""
    executables = Executables(jax.devices()[0].platform, kernels=kernels)
    return executables.compile(function, *args, chained=chained, **static)


def measure_ceilings(size: int = 8192, copy_bytes: int = 2 << 30, inner: int = 8) -> Ceilings:
    """Measure both ceilings with random data and several repetitions."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))

    @jax.jit
    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, inner, lambda _, x: (x @ b) * jnp.bfloat16(0.01), a)

    flops = 2 * size**3 * inner / median_seconds(lambda: products(a, b))
    # The driver's copies, one after the other: a loop of XLA's own over the same bytes takes an eighth
    # longer, and copies inside one executable take longer still.
    x = jnp.arange(copy_bytes // 4, dtype=jnp.uint32)
    copy = jax.jit(jnp.copy)
    return Ceilings(flops, 2 * copy_bytes * inner / median_seconds(lambda: [copy(x) for _ in range(inner)]))


def environment() -> dict[str, Any]:
    """Device, versions, commit, command and date of this run."""
    device = jax.devices()[0]
    arguments = re.sub(r"--out +\S+ *", "", " ".join(sys.argv[1:]))
    packages = ("jax", "jaxlib", "flax", "jdllm", "tokamax", "jax-triton", "triton")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "versions": versions,
        "commit": commit(),
        "command": f"python3 {_program()} {arguments}".strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def commit() -> str | None:
    """The commit of the code that runs, "-dirty" behind it where files other than records differ.

    What `JDLLM_COMMIT` says goes before: files that were sent to a machine come without their history.
    """
    if stated := os.environ.get("JDLLM_COMMIT"):
        return stated

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(RESULTS.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){RESULTS.name}"
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def _program() -> str:
    """What Python was asked to run: `-m` and a module's or package's full name, or a file."""
    spec = sys.modules["__main__"].__spec__
    return sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"


def print_row(row: dict[str, Any]) -> None:
    """Say what was measured before the table is whole."""
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def record(name: str, rows: Sequence[dict[str, Any]], out: Path | None, **extra: Any) -> None:
    """Print `rows` as a table and write them, with the environment, to `<out>/<name>.json`."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = [columns, *([_text(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    write(name, rows, out, **extra)


def write(name: str, rows: Sequence[dict[str, Any]], out: Path | None, **extra: Any) -> None:
    """Write `rows` and `extra`, with the environment, to `<out>/<name>.json`."""
    directory = out or RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": name, **environment(), **extra, "rows": list(rows)}
    (directory / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
