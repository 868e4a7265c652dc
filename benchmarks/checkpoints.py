"""Time to load a checkpoint or to convert it, and the host memory that it takes.

A random checkpoint is written (16 GB for llada-8b), which stays in the page cache where memory allows. Peak
host memory counts above the process before each part; on a CPU backend the weights that are loaded live there
and are subtracted.
"""

import dataclasses
import math
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.cases import case_parser
from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from benchmarks.record import record
from benchmarks.shapes import SHAPES
from jdllm.checkpoints.conversion import to_hf, to_native
from jdllm.checkpoints.default_form import default_form
from jdllm.checkpoints.loading import load_params, read_index, resolve_dtype
from jdllm.checkpoints.native import compare_checksums
from jdllm.engine_options import QUANTIZATIONS
from jdllm.models.hf_config import config_from_hf, read_config
from jdllm.models.weights import is_spec, param_bytes, spec_tree


def measure_load(directory: Path, dtype: str) -> dict[str, float | int | str]:
    """Load the checkpoint in `directory` once.

    Returns seconds, GB/s (of stored bytes), and peak host bytes above the weights beside the bytes of the
    largest stored tensor.
    """
    config = config_from_hf(directory)
    config = config.quantised(*default_form(directory, config, read_config(directory)))
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
    measure_load(write_random_checkpoint(scratch / "small", llada_hf_config(small)), dtype)


def reset_peak() -> int:
    """Forget this process's peak resident memory; returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {key}")
    return int(found[1]) * 1024


def load(arguments: Sequence[str]) -> None:
    """`python3 -m benchmarks load [--shape llada-8b] [--layers N] [--dtype auto] [--quantization int4]
    [--directory DIR]`.

    With a quantization a native checkpoint of matrices in few bits is loaded.
    """
    parser = case_parser("load", load.__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the matrices of layers")
    parser.add_argument(
        "--directory", type=Path, help="where the checkpoint is written (a temporary directory)"
    )
    args = parser.parse_args(arguments)
    shape = SHAPES[args.shape]
    shape = dataclasses.replace(shape, num_layers=args.layers or shape.num_layers)
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        start_device(Path(scratch), args.dtype)
        directory = write_random_checkpoint(Path(scratch) / args.shape, llada_hf_config(shape))
        if args.quantization:
            source, directory = directory, Path(scratch) / args.quantization
            to_native(source, directory, quantize=args.quantization, progress=True)
        row = {
            "shape": args.shape,
            "layers": shape.num_layers,
            "quantization": args.quantization,
            **measure_load(directory, args.dtype),
        }
    record(f"load_{args.quantization}" if args.quantization else "load", [row], args.out)


def measure_conversion(source: Path, scratch: Path) -> list[dict[str, float | int | str]]:
    """Convert the Hugging Face checkpoint in `source`, verify and load the result, and convert it back.

    Returns for each of the four parts seconds, GB/s (of stored bytes), and peak host bytes beside the bytes
    of the largest source tensor and of the largest stacked leaf.
    """
    config = config_from_hf(source)
    dtype = resolve_dtype(source, config, "auto")
    native = scratch / "native"
    sizes = [stored.bytes for stored in read_index(source).values()]
    specs = jax.tree.leaves(spec_tree(config), is_leaf=is_spec)
    on_host = param_bytes(config, dtype) if jax.default_backend() == "cpu" else 0
    parts: list[tuple[str, Callable[[], object], int]] = [
        ("to native", lambda: to_native(source, native, progress=True), 0),
        ("verify", lambda: compare_checksums(native, progress=True), 0),
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


def convert(arguments: Sequence[str]) -> None:
    """`python3 -m benchmarks convert [--shape llada-8b] [--layers N] [--directory DIR]`.

    It needs three times the checkpoint's size on the disk.
    """
    parser = case_parser("convert", convert.__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument(
        "--directory", type=Path, help="where checkpoints are written (a temporary directory)"
    )
    args = parser.parse_args(arguments)
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
        rows = measure_conversion(source, Path(scratch))
    record("convert", [{"shape": args.shape, "layers": shape.num_layers, **row} for row in rows], args.out)
