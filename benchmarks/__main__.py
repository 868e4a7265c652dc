"""Run a benchmark: `python3 -m benchmarks CASE [options]`.

`--list` names the cases, and `CASE --help` its options. Each prints a table and writes it to
`benchmarks/results`, or below `--out`, with the commit, the device, the versions, the command and the date.
"""

import sys
from collections.abc import Sequence

from benchmarks.cases import CASES


def main(arguments: Sequence[str]) -> int:
    """Run the case that comes first; returns its exit code, 2 where there is no such case."""
    if arguments and arguments[0] in CASES:
        return CASES[arguments[0]].load()(arguments[1:]) or 0
    listed = "\n".join(f"  {name:20}{case.what}" for name, case in CASES.items())
    if arguments in (["--list"], ["--help"], ["-h"]):
        print(f"{__doc__}\n{listed}" if arguments != ["--list"] else listed)
        return 0
    asked = f"there is no case {arguments[0]!r}" if arguments else "no case was given"
    print(f"{asked}: expected one of {', '.join(CASES)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
