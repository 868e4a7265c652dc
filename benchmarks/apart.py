"""Rows of a table that are measured one in a process of its own, so that a peak is that of nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.record import print_row, record
from jdllm.planning.host import RUNTIME_LIMIT


def record_apart(
    case: str,
    asked: Sequence[str],
    arguments: Sequence[str],
    name: str,
    out: Any,
    **facts: Any,
) -> None:
    """Measure each row in a process of its own, and record the table.

    Arguments:
    - `case`: its name, which with one of `asked` and `--child` prints a row as a line of JSON.
    - `asked`: what each row is about, among the `arguments` of the command.
    - `name`, `out`, `facts`: of the record.

    What cannot run is named, and stops no other.
    """
    # Not allocated in advance, what random weights took to draw would stay in pieces too small for a pool.
    environment = {RUNTIME_LIMIT: "96", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97", **os.environ}
    options = [option for option in arguments if option not in asked]
    table, failed = [], []
    for one in asked:
        command = [sys.executable, "-m", "benchmarks", case, one, *options, "--child"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            failed.append(one)
            continue
        table.append(json.loads(done.stdout.splitlines()[-1]))
        print_row(table[-1])
    record(name, table, out, **facts)
    if failed:
        raise SystemExit(f"failed: {' '.join(failed)}")
