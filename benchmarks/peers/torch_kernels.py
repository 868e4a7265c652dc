"""Time of single operators in torch on a card: attention, head and dense products, by backend.

Run as `python3 -m benchmarks.peers.torch_kernels [--operators prefill decode head products] [--out DIR]`.
Figures are means over the calls of one CUDA graph, medians of five; operands smaller than four times the L2
cache are rotated over copies. `tb_s` counts keys and values or matrices, read once.
"""

import argparse
import importlib.metadata
import importlib.util
from pathlib import Path

import jax

from benchmarks.record import print_row, record

OPERATORS = ("prefill", "decode", "head", "products")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", choices=OPERATORS, nargs="+", default=OPERATORS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed here: no rows of torch")
        return
    from benchmarks.peers import torch_operators

    torch_operators.torch.manual_seed(0)
    table = []
    for name in args.operators:
        for row in torch_operators.OPERATORS[name]():
            print_row(row)
            table.append(row)
    jax.config.update("jax_platforms", "cpu")  # the card is torch's in this process
    record(
        "torch_kernels",
        table,
        args.out,
        device=torch_operators.torch.cuda.get_device_name(),
        platform="gpu",
        command="python3 -m benchmarks.peers.torch_kernels --operators " + " ".join(args.operators),
        versions={"torch": importlib.metadata.version("torch")},
    )


if __name__ == "__main__":
    main()
