"""The figures that the README quotes, measured again: what moved against the records, and against a checkout.

Run as `python3 -m benchmarks.rerun [NAME...] [--quick] [--against DIR] [--record]` on a card. Each record
names the command that made it; that command runs again, in a process of its own, and every row of its table
stands beside the record's. What differs by more than 5 % is marked. With `--against`, a second checkout of
this repository runs the same command by turns with this one on the same card, which is what tells a change
from another card or another day. `--quick` takes the records of some five minutes.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.record import RESULTS

MOVED = 0.05
"""Share by which a figure may differ without a mark."""

QUOTED = {
    "generate_llada-8b_dual_b16_p512": "tokens_s",
    "generate_llada-8b_dual-head_sparse_b8_p2048": "tokens_s",
    "generate_llada-8b_dual-none-head_sparse_b1_p512": "tokens_s",
    "generate_llada-8b_head_sparse_b8_p2048": "tokens_s",
    "cached_step_llada-8b": "step_ms",
    "cached_step_dream-7b": "step_ms",
    "cached_step_llada-moe-7b": "step_ms",
    "load": "gb_per_s",
    "step_llada-8b": "step_ms",
    "step_dream-7b": "step_ms",
    "step_llada-moe-7b": "step_ms",
}
"""The records that the README quotes, and the column of each that it does."""

QUICK = (*tuple(QUOTED)[:3], "cached_step_llada-8b")

_NOISE = ("warning", "autotun")

Row = Mapping[str, Any]


class Figure(NamedTuple):
    """One row of a table: what it is of, what it was, and what it is now."""

    benchmark: str
    case: str
    record: float | None
    against: float | None
    now: float

    @property
    def moved(self) -> list[str]:
        """The columns from which it differs by more than `MOVED`."""
        return [
            name
            for name, before in (("record", self.record), ("against", self.against))
            if before is not None and abs(self.now / before - 1) > MOVED
        ]


def case_of(row: Row) -> str:
    """What a row is of: all its columns but measured ones, which are fractions or counted by the card."""
    kept = {k: v for k, v in row.items() if isinstance(v, str | int) and not k.endswith(("_mhz", "_bytes"))}
    return " ".join(f"{k}={v}" for k, v in kept.items() if k not in ("steps", "evaluated"))


def compare(
    benchmark: str, record: Sequence[Row], against: Sequence[Row], now: Sequence[Row]
) -> list[Figure]:
    """A figure for each row of `now`, beside those of the same case elsewhere."""
    column = QUOTED[benchmark]
    before, other = ({case_of(row): float(row[column]) for row in rows} for rows in (record, against))
    cases = [(case_of(row), float(row[column])) for row in now]
    return [Figure(benchmark, case, before.get(case), other.get(case), value) for case, value in cases]


def run(command: str, checkout: Path, name: str) -> dict[str, Any]:
    """Run a record's command in a checkout; its output is shown as it comes.

    Returns the record that it wrote. Raises `RuntimeError` where it failed.
    """
    program, *arguments = shlex.split(command)
    with TemporaryDirectory() as out:
        ours = [sys.executable if program.startswith("python") else program, *arguments, "--out", out]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(ours, cwd=checkout, **pipes) as process:
            for line in process.stdout or ():
                if not any(word in line.lower() for word in _NOISE):
                    print(f"  {line.rstrip()}", flush=True)
        if process.returncode:
            raise RuntimeError(f"{command} in {checkout} ended with {process.returncode}")
        return json.loads((Path(out) / f"{name}.json").read_text())


def rerun(name: str, against: Path | None, *, record: bool) -> list[Figure]:
    """Measure one record again."""
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text())
    here = Path(__file__).parents[1]
    other = [] if against is None else run(before["command"], against, name)["rows"]
    now = run(before["command"], here, name)
    if record:
        path.write_text(json.dumps(now, indent=1) + "\n")
    return compare(name, before["rows"], other, now["rows"])


def table_line(figure: Figure) -> str:
    """A line of the table at the end."""
    columns = [f"{figure.now:.4g}"]
    for name, before in (("record", figure.record), ("against", figure.against)):
        if before is not None:
            columns.append(f"{name} {before:.4g} ({figure.now / before:.3f}x)")
    mark = f"  MOVED against {' and '.join(figure.moved)}" if figure.moved else ""
    return f"{figure.benchmark}: {figure.case}: {', '.join(columns)}{mark}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns how many figures moved, 255 at most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUOTED)}; by default all")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, measured by turns")
    parser.add_argument("--record", action="store_true", help="replace the records by what is measured")
    args = parser.parse_args(arguments)
    names = args.names or (QUICK if args.quick else tuple(QUOTED))
    if unknown := set(names) - set(QUOTED):
        parser.error(f"{', '.join(sorted(unknown))}: expected names of {', '.join(QUOTED)}")
    if args.against is not None and not (args.against / "benchmarks").is_dir():
        parser.error(f"{args.against} is no checkout of this repository: it has no benchmarks")
    figures: list[Figure] = []
    for name in names:
        print(name, flush=True)
        figures += rerun(name, args.against, record=args.record)
        print("\n".join(table_line(f) for f in figures if f.benchmark == name), flush=True)
    moved = [figure for figure in figures if figure.moved]
    print(f"\n{len(figures)} figures, {len(moved)} moved by more than {MOVED:.0%}")
    print("\n".join(map(table_line, figures)))
    return min(len(moved), 255)


if __name__ == "__main__":
    sys.exit(main())
