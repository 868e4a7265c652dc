"""Parts of a lane: `--part 2/3` keeps the second of three parts, which take about the same time.

A part is a run of consecutive tests, because tests of a file share models. tests/durations.json holds the
mean seconds of a test of each file. `PYTEST_ADDOPTS=--record-durations make test-slow` measures the files
that it runs, and leaves the other files' seconds as they are. Nothing else should run meanwhile.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, cast

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class Part(NamedTuple):
    """The `number`-th of `count` parts, counted from one."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"{text!r} is no part: 2/3 is the second of three parts")
        return cls(int(number), int(count))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def assign(files: Sequence[str], seconds: Mapping[str, float], count: int) -> list[int]:
    """The part of each test, from 1 to `count`, by the tests' files in the order of their tests.

    `seconds` are those of one test of a file. Tests of a file that it lacks count as the mean of the others.
    """
    known = [seconds[file] for file in files if file in seconds]
    usual = fmean(known) if known else 1.0
    weights = [seconds.get(file, usual) for file in files]
    ends = list(accumulate(weights))
    # A test belongs where its middle falls: a long one overhangs its part by half of its time at most.
    whole = max(ends, default=0.0) or 1.0  # of tests that take no time
    return [
        min(int((end - weight / 2) / whole * count) + 1, count)
        for end, weight in zip(ends, weights, strict=True)
    ]


def durations_path(config: pytest.Config) -> Path:
    return config.rootpath / "tests" / "durations.json"


def read_durations(path: Path) -> dict[str, float]:
    return json.loads(path.read_text()) if path.exists() else {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=Part.parse, default=Part(1, 1), metavar="K/N", help="the K-th of N parts of the tests"
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write the seconds of a test of each file that ran into tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Reports of all processes arrive in the one that has no `workerinput`.
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(durations_path(config), config.rootpath))


# Last, so that `-m` has chosen the lane before it is cut.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = cast(Part, config.getoption("--part"))
    seconds = read_durations(durations_path(config))
    parts = assign([file_of(item.nodeid) for item in items], seconds, part.count)
    chosen = [item for item, number in zip(items, parts, strict=True) if number == part.number]
    left_out = [item for item, number in zip(items, parts, strict=True) if number != part.number]
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


class _ByDirectory(LoadScopeScheduling):
    """Tests of a directory run in one process: they share models, and what is compiled for them."""

    def _split_scope(self, nodeid: str) -> str:
        return file_of(nodeid).rpartition("/")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    return _ByDirectory(config, log) if config.getoption("dist") == "loadscope" else None


class _Recorder:
    """Adds up how long the tests of each file take, with their fixtures."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._seconds[file] += report.duration
        self._tests[file].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        known = {f: s for f, s in read_durations(self._path).items() if (self._root / f).exists()}
        ran = {file: round(s / len(self._tests[file]), 2) for file, s in self._seconds.items()}
        self._path.write_text(json.dumps(known | ran, indent=2, sort_keys=True) + "\n")
