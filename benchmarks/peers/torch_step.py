"""Time of one full denoising step in torch, at the shapes of `benchmarks.step`.

Run as `python3 -m benchmarks.peers.torch_step [--shape llada-8b] [--rows 1024 4096] [--systems torch-eager]`
on a card. Prints a JSON line for each row of the table, and in words what could not be measured;
`benchmarks.step --peers` runs it.
"""

# pyright: reportMissingImports=false

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.shapes import SHAPES
from jdllm.models.config import ModelConfig

SYSTEMS = ("torch-compiled", "torch-eager")
TRANSFERRED = 1


def measure(shape: str, rows: Sequence[int], systems: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row of the table for each count of rows and each system; half of the rows are masked."""
    import torch

    from benchmarks.peers.torch_model import random_weights
    from benchmarks.peers.torch_timing import reason

    config = SHAPES[shape]
    torch.manual_seed(0)
    weights = random_weights(config, "cuda", torch.bfloat16)
    for count in rows:
        masked = torch.arange(count - count // 2, count, device="cuda")
        tokens = torch.randint(0, config.defined_ids, (count,), device="cuda")
        tokens[masked] = config.mask_id
        for system in systems:
            torch.compiler.reset()
            torch.cuda.empty_cache()
            try:
                measured = _measure_compiled if system == "torch-compiled" else _measure_eager
                with torch.no_grad():
                    row = measured(weights, config, masked, tokens)
            except RuntimeError as e:
                print(f"{system}: no row for {shape} at {count} rows: {reason(e)}", flush=True)
                continue
            yield {"shape": shape, "rows": count, "masked": count // 2, "system": system, **row}


def _measure_compiled(weights: Any, config: ModelConfig, masked: Any, tokens: Any) -> dict[str, Any]:
    from benchmarks.peers.torch_model import compiled_step, fastest_attention
    from benchmarks.peers.torch_timing import event_seconds

    attention = fastest_attention(config, len(tokens))
    step = compiled_step(weights, config, masked, TRANSFERRED, attention)
    with attention.selected():
        start = time.perf_counter()
        step(tokens).cpu()
        compile_seconds = time.perf_counter() - start
        seconds = event_seconds(lambda: step(tokens))
    return {"attention": attention.backend, "step_ms": 1e3 * seconds, "compile_s": compile_seconds}


def _measure_eager(weights: Any, config: ModelConfig, masked: Any, tokens: Any) -> dict[str, Any]:
    from benchmarks.peers.torch_model import eager_step
    from benchmarks.peers.torch_timing import event_seconds

    step = eager_step(weights, config, masked, TRANSFERRED)
    return {"attention": "torch's choice", "step_ms": 1e3 * event_seconds(lambda: step(tokens))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--systems", choices=SYSTEMS, nargs="+", default=SYSTEMS)
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed here: no rows of torch")
        return
    for row in measure(args.shape, args.rows, args.systems):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
