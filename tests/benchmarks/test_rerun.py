"""Records measured again: what runs, what is compared with what, and what is said to have moved."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import record, rerun
from benchmarks.record import RESULTS
from benchmarks.rerun import MEASURED, Quoted, compare, main

NAME = "load"
FAKE = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("case", nargs="?")
parser.add_argument("--peers", action="store_true")
parser.add_argument("--out", type=pathlib.Path)
args = parser.parse_args()
print("W0000 some autotuning warning")
print("peers" if args.peers else "alone", args.case, "in", pathlib.Path.cwd().name)
figures = pathlib.Path("figures")
first, _, rest = figures.read_text().partition(" ")
figures.write_text(rest)
rows = [{"shape": "a", "gb_per_s": float(first)}]
rows += [{"shape": "b", "gb_per_s": 2.0, "steps": 62, "evaluated": 62 if args.peers else 94}]
record = {"device": "card", "rows": rows}
(args.out / "load.json").write_text(json.dumps(record))
"""


def checkout(directory: Path, *figures: float) -> Path:
    """One that reaches each of `figures` in turn."""
    (directory / "benchmarks" / "results").mkdir(parents=True)
    (directory / "benchmarks" / "__main__.py").write_text(FAKE)
    (directory / "figures").write_text(" ".join(map(str, figures)))
    return directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose record is 10.0 and which reaches 8.0 and then 8.2 now."""
    monkeypatch.setitem(MEASURED, NAME, Quoted("gb_per_s", "load --peers"))
    directory = checkout(tmp_path / "here", 8.0, 8.2)
    results = directory / "benchmarks" / "results"
    rows = [{"shape": "a", "gb_per_s": 10.0}, {"shape": "b", "gb_per_s": 2.05}]
    record = {"device": "card", "rows": rows}
    (results / "load.json").write_text(json.dumps(record))
    monkeypatch.setattr(rerun, "RESULTS", results)
    monkeypatch.setattr(rerun, "__file__", str(directory / "benchmarks" / "rerun.py"))
    return directory


def recorded(here: Path) -> float:
    return json.loads((here / "benchmarks/results/load.json").read_text())["rows"][0]["gb_per_s"]


def test_what_moved_is_named_and_counted(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main([NAME]) == 1
    out = capsys.readouterr().out
    assert "load: shape=a: 8, record 10 (0.800x)  MOVED against record\n" in out
    assert "load: shape=b: 2, record 2.05 (0.976x), evaluated 62 for 62 steps\n" in out
    assert "2 figures, 1 moved by more than 5%, 0 benchmarks failed\n" in out
    assert "autotuning" not in out
    assert recorded(here) == 10.0


@pytest.mark.usefixtures("here")
def test_checkouts_take_turns_and_their_medians_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = checkout(tmp_path / "other", 8.6, 8.8)
    assert main([NAME, "--against", str(other)]) == 1
    out = capsys.readouterr().out
    turns = [line.split()[-1] for line in out.splitlines() if line.startswith("  peers load in")]
    assert turns == ["other", "here", "other", "here"]
    marks = "MOVED against record and against"
    assert f"load: shape=a: 8.1, record 10 (0.810x), against 8.7 (0.931x)  {marks}\n" in out


@pytest.mark.usefixtures("here")
def test_an_older_checkout_runs_what_its_own_record_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    older = checkout(tmp_path / "older", 8.6)
    (older / "benchmarks" / "__main__.py").rename(older / "benchmarks" / "fake.py")
    main([NAME, "--turns", "1", "--against", str(older)])
    assert f"{older} has neither cases nor a record load" in capsys.readouterr().out
    record = {"command": "python3 -m benchmarks.fake"}
    (older / "benchmarks" / "results" / "load.json").write_text(json.dumps(record))
    main([NAME, "--turns", "1", "--against", str(older)])
    out = capsys.readouterr().out
    assert "alone None in older" in out
    assert "load: shape=a: 8, record 10 (0.800x), against 8.6 (0.930x)" in out


@pytest.mark.usefixtures("here")
def test_steps_that_were_lost_are_marked(capsys: pytest.CaptureFixture[str]):
    assert main([NAME, "--no-peers"]) == 2
    assert "evaluated 94 for 62 steps  NOT ITS STEPS\n" in capsys.readouterr().out


def test_steps_that_one_turn_lost_are_marked():
    rows = [{"gb_per_s": 1.0, "steps": 62, "evaluated": evaluated} for evaluated in (62, 94, 62)]
    [figure] = compare("load", [], [], rows)
    assert (figure.evaluated, figure.astray) == (94, True)


def test_a_record_of_another_card_is_not_compared(here: Path, capsys: pytest.CaptureFixture[str]):
    path = here / "benchmarks/results/load.json"
    path.write_text(path.read_text().replace('"card"', '"slower card"'))
    assert main([NAME]) == 0
    out = capsys.readouterr().out
    assert "the record is of slower card, this is card: not compared" in out
    assert "load: shape=a: 8\n" in out


def test_records_are_replaced_on_request(here: Path):
    main([NAME, "--record"])
    assert recorded(here) == 8.0


FAILING = {
    "raise SystemExit(3)": "ended with 3",
    "pass": "wrote no failing.json",
}


@pytest.mark.parametrize("program", FAILING)
def test_a_benchmark_that_fails_is_named_and_stops_no_other(
    here: Path, program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    runner = here / "benchmarks" / "__main__.py"
    runner.write_text(f"import sys\nif sys.argv[1] == 'failing':\n    {program}\nelse:\n    exec({FAKE!r})")
    monkeypatch.setitem(MEASURED, "failing", Quoted("gb_per_s", "failing"))
    program = FAILING[program]
    assert main(["failing", NAME]) == 2
    out = capsys.readouterr().out
    assert "2 figures, 1 moved by more than 5%, 1 benchmarks failed\n" in out
    assert f"failing: python3 -m benchmarks failing in {here} {program}\n" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "nothing"),
        (["--against", "."], "checkout"),
        (["--turns", "0"], "--turns 0: expected 1 or more"),
        (["--quick", "--record"], "--record keeps whole records"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    arguments = [str(tmp_path) if a == "." else a for a in arguments]
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in MEASURED if (RESULTS / f"{name}.json").exists()])
def test_every_quoted_record_compares_with_itself_row_by_row(name: str):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    figures = compare(name, rows, rows, rows)
    assert len({figure.case for figure in figures}) == len(rows)
    assert not any(figure.moved for figure in figures)


class TestCommit:
    @pytest.fixture
    def repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        results = tmp_path / "benchmarks" / "results"
        results.mkdir(parents=True)
        for path in (results / "load.json", tmp_path / "code.py"):
            path.write_text("")
        monkeypatch.setattr(record, "RESULTS", results)
        monkeypatch.delenv("JDLLM_COMMIT", raising=False)
        return tmp_path

    @staticmethod
    def git(repository: Path, *arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=repository, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def test_is_of_the_code_whatever_became_of_records(self, repository: Path):
        self.git(repository, "init")
        self.git(repository, "add", ".")
        self.git(repository, "commit", "-m", "all")
        head = self.git(repository, "rev-parse", "HEAD")
        (repository / "benchmarks/results/load.json").write_text("another record")
        assert record.environment()["commit"] == head
        (repository / "code.py").write_text("another code")
        assert record.environment()["commit"] == f"{head}-dirty"

    def test_is_unknown_without_git_unless_the_environment_says_it(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.parent))
        assert record.environment()["commit"] is None
        monkeypatch.setenv("PATH", str(repository))
        assert record.environment()["commit"] is None
        monkeypatch.setenv("JDLLM_COMMIT", "abc")
        assert record.environment()["commit"] == "abc"

    def test_is_what_the_environment_says_where_the_history_is_of_other_files(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch
    ):
        self.git(repository, "init")
        self.git(repository, "add", ".")
        self.git(repository, "commit", "-m", "all")
        monkeypatch.setenv("JDLLM_COMMIT", "abc")
        assert record.environment()["commit"] == "abc"
