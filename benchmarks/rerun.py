"""The figures that the README quotes, measured again: what moved against the records, and against a checkout.

Run as `python3 -m benchmarks rerun [NAME...] [--quick] [--against DIR] [--record]` on a card. The command of
each record runs again, in a process of its own, and every row of its table stands beside the record's, if
that is of such a card. What differs by more than 5 % is marked, and so is a
generation for which the device evaluated other than its steps. With `--against`, a second checkout of this
repository runs the same command by turns with this one on the same card, which is what tells a change from
another card or another day. `--quick` takes the records of some five minutes, without peers;
`--long` adds the longest contexts. A benchmark that fails is named at the end and stops no other.
"""

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.cases import case_parser
from benchmarks.record import RESULTS

MOVED = 0.05
"""Share by which a figure may differ without a mark."""


class Quoted(NamedTuple):
    """A record that the README quotes.

    - `column`: the column of its figures.
    - `command`: what makes it, behind `python3 -m benchmarks`.
    """

    column: str
    command: str


QUOTED = {
    "generate_llada-8b_dual_b16_p512": Quoted("tokens_s", "generate --cache dual --batch 16 --prompt 512"),
    "generate_llada-8b_dual_b8_p2048": Quoted("tokens_s", "generate --cache dual --batch 8 --prompt 2048"),
    "generate_llada-8b_dual-head_sparse_b8_p2048": Quoted(
        "tokens_s", "generate --cache dual head_sparse --delay 0 --batch 8 --prompt 2048"
    ),
    "generate_llada-8b_dual-none-head_sparse_b1_p512": Quoted(
        "tokens_s", "generate --cache dual none head_sparse --batch 1 --prompt 512"
    ),
    "generate_llada-8b_head_sparse_b8_p2048": Quoted(
        "tokens_s", "generate --cache head_sparse --delay 1 --batch 8 --prompt 2048"
    ),
    "ragged_llada-8b": Quoted("tokens_s", "ragged --delay 1 0"),
    "cached_step_llada-8b": Quoted("step_ms", "cached_step --shape llada-8b --form chain layers"),
    "cached_step_dream-7b": Quoted("step_ms", "cached_step --shape dream-7b --form chain layers"),
    "cached_step_llada-moe-7b": Quoted("step_ms", "cached_step --shape llada-moe-7b --form layers xla"),
    "load": Quoted("gb_per_s", "load"),
    "step_llada-8b": Quoted("step_ms", "step --shape llada-8b --rows 1024 4096 16384 32768 --peers"),
    "step_dream-7b": Quoted("step_ms", "step --shape dream-7b --rows 1024 4096 16384 32768 --peers"),
    "step_llada-moe-7b": Quoted("step_ms", "step --shape llada-moe-7b --rows 1024 4096 16384 --peers"),
}
"""The records that the README and docs/results.md quote."""

LONG = {
    "plan_longest": Quoted("step_s", "plan --part longest --context 400000"),
    "tiers_llada-8b_residual_1048576": Quoted(
        "layer_s", "tiers --rows 1048576 --layers 2 --tier residual --groups 4 --memory-gib 24"
    ),
}
"""Those that take minutes for a step."""

OPERATORS = {
    "masked_logits_llada-8b_top": Quoted("ms", "masked_logits --rows 32 256 1024 4096"),
    "attention": Quoted("ms", "attention --heads 32x32"),
    "split_attention_32x32": Quoted(
        "us", "split_attention --shapes 32x32 --implementations chained mosaic_gpu"
    ),
    "grouped_matmul": Quoted("ms", "grouped_matmul --implementations mosaic_gpu tokamax"),
    "skinny_matmul": Quoted("us", "skinny_matmul --shapes llada-8b"),
}
"""Those of single kernels, measured where they are named."""

MEASURED = QUOTED | LONG | OPERATORS

QUICK = (*tuple(QUOTED)[:3], "cached_step_llada-8b", "step_llada-8b")

_NOISE = ("warning", "autotun")

Row = Mapping[str, Any]


class Figure(NamedTuple):
    """One row of a table: what it is of, what it was, and what it is now.

    `steps` are those of a generation and `evaluated` those that the device ran, where a row tells.
    """

    benchmark: str
    case: str
    record: float | None
    against: float | None
    now: float
    steps: int | None = None
    evaluated: int | None = None

    @property
    def moved(self) -> list[str]:
        """The columns from which it differs by more than `MOVED`."""
        return [
            name
            for name, before in (("record", self.record), ("against", self.against))
            if before is not None and abs(self.now / before - 1) > MOVED
        ]

    @property
    def astray(self) -> bool:
        """Whether the device evaluated other than the steps."""
        return self.evaluated is not None and self.evaluated != self.steps


def case_of(row: Row) -> str:
    """What a row is of: all its columns but measured ones, which are fractions or counted by the card."""
    kept = {k: v for k, v in row.items() if isinstance(v, str | int) and not k.endswith(("_mhz", "_bytes"))}
    return " ".join(f"{k}={v}" for k, v in kept.items() if k not in ("steps", "evaluated"))


def compare(
    benchmark: str, record: Sequence[Row], against: Sequence[Row], now: Sequence[Row]
) -> list[Figure]:
    """A figure for each case of `now`, beside those of the same case elsewhere.

    Rows of one case, from several turns, count by their median, and by the turn that evaluated most.
    """
    column = MEASURED[benchmark].column
    before, other, ours = (_medians(rows, column) for rows in (record, against, now))
    most = {case_of(row): row for row in sorted(now, key=lambda row: row.get("evaluated", 0))}

    def figure(case: str) -> Figure:
        steps, evaluated = (most[case].get(column) for column in ("steps", "evaluated"))
        return Figure(benchmark, case, before.get(case), other.get(case), ours[case], steps, evaluated)

    return [figure(case) for case in ours]


def _medians(rows: Sequence[Row], column: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(case_of(row), []).append(float(row[column]))
    return {case: statistics.median(own) for case, own in values.items()}


def command_in(checkout: Path, name: str) -> list[str]:
    """What makes a record in a checkout: ours, or what the checkout's own record says where it is older.

    Raises `RuntimeError` for an older checkout without this record.
    """
    if (checkout / "benchmarks" / "__main__.py").exists():
        return ["python3", "-m", "benchmarks", *shlex.split(MEASURED[name].command)]
    record = checkout / "benchmarks" / "results" / f"{name}.json"
    if not record.exists():
        raise RuntimeError(f"{checkout} has neither cases nor a record {name}")
    return shlex.split(json.loads(record.read_text())["command"])


def run(checkout: Path, name: str, *, peers: bool) -> dict[str, Any]:
    """Measure a record in a checkout; the output is shown as it comes.

    Without `peers` the command leaves out torch and plain JAX. Returns the record that was written. Raises
    `RuntimeError` where that failed.
    """
    command = [part for part in command_in(checkout, name) if peers or part != "--peers"]
    said = f"{shlex.join(command)} in {checkout}"
    program, *arguments = command
    with TemporaryDirectory() as out:
        ours = [sys.executable if program.startswith("python") else program, *arguments, "--out", out]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(ours, cwd=checkout, **pipes) as process:
            for line in process.stdout or ():
                if not any(word in line.lower() for word in _NOISE):
                    print(f"  {line.rstrip()}", flush=True)
        if process.returncode:
            raise RuntimeError(f"{said} ended with {process.returncode}")
        written = Path(out) / f"{name}.json"
        if not written.exists():
            raise RuntimeError(f"{said} wrote no {written.name}")
        return json.loads(written.read_text())


def rerun(name: str, against: Path | None, turns: int, *, peers: bool, record: bool) -> list[Figure]:
    """Measure one record again so many times, by turns with the checkout `against`.

    `peers` as of `run`. A record that there is not yet is made. Raises `RuntimeError` where a run failed.
    """
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text()) if path.exists() else None
    here = Path(__file__).parents[1]
    other, ours, now = [], [], {}
    for _ in range(turns):
        if against:
            other += run(against, name, peers=peers)["rows"]
        now = run(here, name, peers=peers)
        ours += now["rows"]
    if record:
        path.write_text(json.dumps(now, indent=1) + "\n")
    recorded = [] if before is None else before["rows"]
    if before is not None and now["device"] != before["device"]:
        print(f"the record is of {before['device']}, this is {now['device']}: not compared", flush=True)
        recorded = []
    return compare(name, recorded, other, ours)


def table_line(figure: Figure) -> str:
    """A line of the table at the end."""
    columns = [f"{figure.now:.4g}"]
    for name, before in (("record", figure.record), ("against", figure.against)):
        if before is not None:
            columns.append(f"{name} {before:.4g} ({figure.now / before:.3f}x)")
    if figure.evaluated is not None:
        columns.append(f"evaluated {figure.evaluated} for {figure.steps} steps")
    mark = f"  MOVED against {' and '.join(figure.moved)}" if figure.moved else ""
    return f"{figure.benchmark}: {figure.case}: {', '.join(columns)}{mark}{'  NOT ITS STEPS' * figure.astray}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns how many figures are marked and benchmarks failed, 255 at most."""
    parser = case_parser("rerun", __doc__, records=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURED)}")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, without peers")
    parser.add_argument("--long", action="store_true", help=f"{', '.join(LONG)} too")
    parser.add_argument("--no-peers", action="store_true", help="full steps without torch and plain JAX")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, measured by turns")
    parser.add_argument("--turns", type=int, help="runs of each, by default 1, and 2 with --against")
    parser.add_argument("--record", action="store_true", help="replace the records by what is measured")
    args = parser.parse_args(arguments)
    names = args.names or [*(QUICK if args.quick else QUOTED), *(LONG if args.long else ())]
    peers = not (args.quick or args.no_peers)
    if unknown := set(names) - set(MEASURED):
        parser.error(f"{', '.join(sorted(unknown))}: expected names of {', '.join(MEASURED)}")
    if args.against is not None and not (args.against / "benchmarks").is_dir():
        parser.error(f"{args.against} is no checkout of this repository: it has no benchmarks")
    if args.record and not peers:
        parser.error("--record keeps whole records: leave out --quick and --no-peers")
    against = args.against and args.against.resolve()
    turns = (2 if against else 1) if args.turns is None else args.turns
    if turns < 1:
        parser.error(f"--turns {turns}: expected 1 or more")
    figures: list[Figure] = []
    failed: list[str] = []
    for name in names:
        print(name, flush=True)
        try:
            new = rerun(name, against, turns, peers=peers, record=args.record)
        except RuntimeError as e:
            failed.append(f"{name}: {e}")
            print(failed[-1], flush=True)
            continue
        figures += new
        print("\n".join(map(table_line, new)), flush=True)
    marked = [figure for figure in figures if figure.moved or figure.astray]
    moved = sum(bool(figure.moved) for figure in figures)
    print(
        f"\n{len(figures)} figures, {moved} moved by more than {MOVED:.0%}, {len(failed)} benchmarks failed"
    )
    print("\n".join([*map(table_line, figures), *failed]))
    return min(len(marked) + len(failed), 255)
