"""Time of converting a checkpoint to the native format and back, and the host memory that it takes.

Run as `python3 -m benchmarks.convert [--shape llada-8b] [--layers N] [--directory DIR] [--out FILE]`.
Writes a random checkpoint (16 GB for llada-8b), which stays in the page cache where memory allows, and needs
three times its size on the disk. Peak host memory counts above the process before each part; on a CPU backend
the weights that are loaded live there and are subtracted.
"""

import argparse
import dataclasses
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from benchmarks.load import reset_peak, start_device, status_bytes
from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from benchmarks.record import record
from benchmarks.shapes import SHAPES
from jdllm.models.config import ModelConfig
from jdllm.models.conversion import to_hf, to_native
from jdllm.models.loading import load_params, read_index, resolve_dtype
from jdllm.models.native import verify
from jdllm.models.weights import is_spec, param_bytes, spec_tree


def measure(source: Path, scratch: Path) -> list[dict[str, float | int | str]]:
    """Convert the Hugging Face checkpoint in `source`, verify and load the result, and convert it back.

    Returns for each of the four parts seconds, GB/s (of stored bytes), and peak host bytes beside the bytes
    of the largest source tensor and of the largest stacked leaf.
    """
    config = ModelConfig.from_hf(source)
    dtype = resolve_dtype(source, config, "auto")
    native = scratch / "native"
    sizes = [stored.bytes for stored in read_index(source).values()]
    specs = jax.tree.leaves(spec_tree(config), is_leaf=is_spec)
    on_host = param_bytes(config, dtype) if jax.default_backend() == "cpu" else 0
    parts: list[tuple[str, Callable[[], object], int]] = [
        ("to native", lambda: to_native(source, native, progress=True), 0),
        ("verify", lambda: verify(native, progress=True), 0),
        ("load", lambda: load_params(native, config, dtype, progress=True), on_host),
        ("to hf", lambda: to_hf(native, scratch / "hf", progress=True), 0),
    ]
    rows = []
    for part, run, expected in parts:
        before = reset_peak()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        rows.append(
            {
                "part": part,
                "stored_bytes": sum(sizes),
                "seconds": seconds,
                "gb_per_s": sum(sizes) / seconds / 1e9,
                "host_peak_bytes": status_bytes("VmHWM") - before - expected,
                "largest_tensor_bytes": max(sizes),
                "largest_leaf_bytes": max(math.prod(spec.shape) for spec in specs) * np.dtype(dtype).itemsize,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument(
        "--directory", type=Path, help="where checkpoints are written (a temporary directory)"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    shape = dataclasses.replace(shape, num_layers=args.layers or shape.num_layers)
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        source = Path(scratch) / args.shape
        # Another process: memory that this one had freed would hide in the peaks.
        writer = multiprocessing.get_context("spawn").Process(
            target=write_random_checkpoint, args=(source, llada_hf_config(shape))
        )
        writer.start()
        writer.join()
        start_device(Path(scratch))
        rows = measure(source, Path(scratch))
    record("convert", [{"shape": args.shape, "layers": shape.num_layers, **row} for row in rows], args.out)


if __name__ == "__main__":
    main()
