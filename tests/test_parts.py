"""Parts of a lane are disjoint, complete and about equally long, whatever is known of their tests."""

import json
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts import assign

pytest_plugins = ["pytester"]

FILES = [f"test_{letter}.py" for letter in "abcdef"]
DURATIONS = st.dictionaries(st.sampled_from(FILES), st.just(0.0) | st.floats(0.01, 1000))


@given(st.lists(st.sampled_from(FILES)), DURATIONS, st.integers(1, 5))
def test_each_test_is_in_one_part_and_parts_are_consecutive(
    files: list[str], seconds: dict[str, float], count: int
):
    parts = assign(files, seconds, count)
    assert len(parts) == len(files)
    assert set(parts) <= set(range(1, count + 1))
    assert all(left <= right for left, right in pairwise(parts))


@given(st.lists(st.sampled_from(FILES)), st.lists(st.floats(0.01, 1000), min_size=6, max_size=6))
def test_a_part_is_longer_than_its_share_by_one_test_at_most(files: list[str], each: list[float]):
    seconds = dict(zip(FILES, each, strict=True))
    parts = assign(files, seconds, 3)
    weights = [seconds[file] for file in files]
    for part in (1, 2, 3):
        length = sum(w for w, number in zip(weights, parts, strict=True) if number == part)
        assert length <= sum(weights) / 3 + max(weights, default=0) + 1e-6


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """Three files of tests, of which two have recorded durations."""
    tests = pytester.mkdir("tests")
    for name, count in {"long": 2, "new": 1, "short": 4}.items():
        body = "".join(f"def test_{i}():\n    pass\n" for i in range(count))
        (tests / f"test_{name}.py").write_text(body)
    durations = {"tests/test_long.py": 6.0, "tests/test_short.py": 1.0, "tests/test_gone.py": 9.0}
    (tests / "durations.json").write_text(json.dumps(durations))
    return pytester


def ran(project: pytest.Pytester, *arguments: str) -> list[str]:
    """The tests that a run with these arguments passes."""
    calls = project.inline_run("-p", "tests.parts", *arguments).getreports("pytest_runtest_logreport")
    return [r.nodeid for r in calls if r.when == "call" and r.passed]


def test_parts_of_a_run_are_the_run(project: pytest.Pytester):
    parts = [ran(project, "--part", f"{k}/3") for k in (1, 2, 3)]
    assert [*chain(*parts)] == ran(project)
    # Long tests take 12 of 18.7 seconds: each has a part, and the others share the last one.
    assert [len(part) for part in parts] == [1, 1, 5]


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/0"])
def test_no_part(project: pytest.Pytester, part: str):
    result = project.runpytest_inprocess("-p", "tests.parts", "--part", part)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*'{part}' is no part: 2/3 is the second of three parts*"])


def test_recorded_durations_are_those_of_files_that_ran_and_others_stay(project: pytest.Pytester):
    ran(project, "--record-durations", "tests/test_new.py", "tests/test_short.py")
    recorded = json.loads((project.path / "tests" / "durations.json").read_text())
    assert set(recorded) == {"tests/test_long.py", "tests/test_new.py", "tests/test_short.py"}
    assert recorded["tests/test_long.py"] == 6.0
    assert recorded["tests/test_short.py"] < 1
