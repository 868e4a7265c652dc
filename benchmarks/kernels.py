"""Times of the operators that have kernels of their own: the benchmarks of `benchmarks.operators` in turn.

Run as `python3 -m benchmarks.kernels [--operators masked_logits attention] [--out DIR]` on a card. Each runs
as it does alone without options. Rows of tokamax need the extra `bench`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.operators import attention, grouped_matmul, masked_logits, skinny_matmul, split_attention

OPERATORS = {
    "masked_logits": masked_logits.main,
    "attention": attention.main,
    "split_attention": split_attention.main,
    "grouped_matmul": grouped_matmul.main,
    "skinny_matmul": skinny_matmul.main,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", choices=OPERATORS, nargs="+", default=list(OPERATORS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    out = [] if args.out is None else ["--out", str(args.out)]
    for name in args.operators:
        OPERATORS[name](out)


if __name__ == "__main__":
    main()
