"""Convert a Hugging Face checkpoint to a native one, an Orbax checkpoint of the stacked weights.

Run as `python3 convert/hf_to_orbax.py SRC DST [--dtype bfloat16] [--overwrite]`. `jdllm convert` does the
same, and the way back.
"""

import argparse
import sys
from pathlib import Path

from jdllm.checkpoints.conversion import to_native
from jdllm.checkpoints.loading import resolve
from jdllm.errors import JdllmError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", metavar="SRC", help="checkpoint directory, or a hub id")
    parser.add_argument("target", metavar="DST", type=Path, help="directory to make")
    parser.add_argument("--dtype", default="auto", help="cast weights; auto keeps their types")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DST")
    args = parser.parse_args()
    try:
        to_native(
            resolve(args.source), args.target, dtype=args.dtype, overwrite=args.overwrite, progress=True
        )
    except JdllmError as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
