"""Time to load a checkpoint, and the host memory that it takes.

Run as `python3 -m benchmarks.load [--shape llada-8b] [--layers N] [--dtype auto] [--directory DIR]`.
Writes a random checkpoint (16 GB for llada-8b), which stays in the page cache where memory allows, and loads
it. Peak host memory counts above the process before loading; on a CPU backend
the weights themselves live there and are subtracted.
"""

import argparse
import dataclasses
import re
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from benchmarks.record import record
from benchmarks.shapes import SHAPES
from jdllm.models.config import ModelConfig
from jdllm.models.loading import load_params, read_index, resolve_dtype
from jdllm.models.weights import param_bytes


def measure(directory: Path, dtype: str) -> dict[str, float | int | str]:
    """Load the checkpoint in `directory` once.

    Returns seconds, GB/s (of stored bytes), and peak host bytes above the weights beside the bytes of the
    largest stored tensor.
    """
    config = ModelConfig.from_hf(directory)
    dtype = resolve_dtype(directory, config, dtype)
    sizes = [stored.bytes for stored in read_index(directory).values()]
    on_host = param_bytes(config, dtype) if jax.default_backend() == "cpu" else 0
    before = reset_peak()
    start = time.perf_counter()
    load_params(directory, config, dtype, progress=True)
    seconds = time.perf_counter() - start
    return {
        "dtype": dtype,
        "stored_bytes": sum(sizes),
        "seconds": seconds,
        "gb_per_s": sum(sizes) / seconds / 1e9,
        "host_peak_above_weights_bytes": status_bytes("VmHWM") - before - on_host,
        "largest_tensor_bytes": max(sizes),
    }


def start_device(scratch: Path, dtype: str = "auto") -> None:
    """Load something small, so that the device's libraries are not counted with what is measured."""
    small = dataclasses.replace(
        SHAPES["llada-8b"], vocab_size=1024, hidden_size=512, intermediate_size=512, num_layers=1
    )
    small = dataclasses.replace(small, num_heads=4, num_kv_heads=4)
    measure(write_random_checkpoint(scratch / "small", llada_hf_config(small)), dtype)


def reset_peak() -> int:
    """Forget this process's peak resident memory; returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {key}")
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--directory", type=Path, help="where the checkpoint is written (a temporary directory)"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    shape = dataclasses.replace(shape, num_layers=args.layers or shape.num_layers)
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        start_device(Path(scratch), args.dtype)
        directory = write_random_checkpoint(Path(scratch) / args.shape, llada_hf_config(shape))
        row = {"shape": args.shape, "layers": shape.num_layers, **measure(directory, args.dtype)}
    record("load", [row], args.out)


if __name__ == "__main__":
    main()
