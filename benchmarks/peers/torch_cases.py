"""Times in torch on a card: full denoising steps at the shapes of ours, and single operators.

Torch is imported where it is used: what can be said without it is said.
"""

# pyright: reportMissingImports=false

import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks.cases import case_parser
from benchmarks.operators.split_attention import HEADS
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.models.config import ModelConfig

SYSTEMS = ("torch-compiled", "torch-eager")
FLOAT8 = "torch-compiled-fp8"
OPERATORS = ("prefill", "decode", "head", "products")
TRANSFERRED = 1


def measure(shape: str, rows: Sequence[int], systems: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row of the table for each count of rows and each system; half of the rows are masked."""
    import torch

    from benchmarks.peers.torch_model import random_weights, reason, with_floats_of_8_bits

    config = SHAPES[shape]
    torch.manual_seed(0)
    weights = random_weights(config, "cuda", torch.bfloat16)
    float8 = with_floats_of_8_bits(weights) if FLOAT8 in systems else weights
    for count in rows:
        masked = torch.arange(count - count // 2, count, device="cuda")
        tokens = torch.randint(0, config.defined_ids, (count,), device="cuda")
        tokens[masked] = config.mask_id
        for system in systems:
            torch.compiler.reset()
            torch.cuda.empty_cache()
            try:
                measured = _measure_eager if system == "torch-eager" else _measure_compiled
                with torch.no_grad():
                    row = measured(float8 if system == FLOAT8 else weights, config, masked, tokens)
            except RuntimeError as e:
                print(f"{system}: no row for {shape} at {count} rows: {reason(e)}", flush=True)
                continue
            yield {"shape": shape, "rows": count, "masked": count // 2, "system": system, **row}


def _measure_compiled(weights: Any, config: ModelConfig, masked: Any, tokens: Any) -> dict[str, Any]:
    from benchmarks.peers.torch_model import compiled_step, event_seconds, fastest_attention

    attention = fastest_attention(config, len(tokens))
    step = compiled_step(weights, config, masked, TRANSFERRED, attention)
    with attention.selected():
        start = time.perf_counter()
        step(tokens).cpu()
        compile_seconds = time.perf_counter() - start
        seconds = event_seconds(lambda: step(tokens))
    return {"attention": attention.backend, "step_ms": 1e3 * seconds, "compile_s": compile_seconds}


def _measure_eager(weights: Any, config: ModelConfig, masked: Any, tokens: Any) -> dict[str, Any]:
    from benchmarks.peers.torch_model import eager_step, event_seconds

    step = eager_step(weights, config, masked, TRANSFERRED)
    return {"attention": "torch's choice", "step_ms": 1e3 * event_seconds(lambda: step(tokens))}


def step(arguments: Sequence[str]) -> None:
    """A full step: `python3 -m benchmarks torch_step [--shape llada-8b] [--rows 1024 4096]` on a card.

    Prints a JSON line for each row of the table, and in words what could not be measured. `step --peers` runs
    it.
    """
    parser = case_parser("torch_step", step.__doc__, records=False)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--systems", choices=(*SYSTEMS, FLOAT8), nargs="+", default=SYSTEMS)
    args = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed here: no rows of torch")
        return
    for row in measure(args.shape, args.rows, args.systems):
        print(json.dumps(row), flush=True)


def kernels(arguments: Sequence[str]) -> None:
    """Single operators: `python3 -m benchmarks torch_kernels [--operators prefill decode] [--shapes 32x8]` on
    a card. Shapes are query and key-value heads of attention to cached keys.

    Figures are means over the calls of one CUDA graph, medians of five; operands smaller than four times the
    L2 cache are rotated over copies. `tb_s` counts keys and values or matrices, read once.
    """
    parser = case_parser("torch_kernels", kernels.__doc__)
    parser.add_argument("--operators", choices=OPERATORS, nargs="+", default=OPERATORS)
    parser.add_argument("--shapes", choices=HEADS, nargs="+", default=HEADS)
    args = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed here: no rows of torch")
        return
    from benchmarks.peers import torch_operators

    torch_operators.torch.manual_seed(0)
    found = torch_operators.operators([tuple(map(int, shape.split("x"))) for shape in args.shapes])
    table = []
    for name in args.operators:
        for row in found[name]():
            print_row(row)
            table.append(row)
    jax.config.update("jax_platforms", "cpu")  # the card is torch's in this process
    record(
        "torch_kernels",
        table,
        args.out,
        device=torch_operators.torch.cuda.get_device_name(),
        platform="gpu",
        command=" ".join(["python3 -m benchmarks torch_kernels", *arguments]),
        versions={"torch": importlib.metadata.version("torch")},
    )
