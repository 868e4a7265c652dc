"""Traces: files written by hand, and the requests that they say."""

import re
from pathlib import Path

import pytest

from jdllm.bench.trace import Arrival, read_trace
from jdllm.errors import RequestError
from tests.helpers import ROOT

BURSTS = ROOT / "benchmarks/workloads/bursts120.jsonl"

TRACE = """\
{"at": 0.25, "prompt_tokens": 5}

{"at": 0.25, "prompt_tokens": 3, "gen_length": 12}
{"gen_length": null, "prompt_tokens": 16777216, "at": 3}
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "trace.jsonl"
    path.write_text(text)
    return path


def test_a_trace_says_when_and_how_long(tmp_path: Path):
    path = written(tmp_path, TRACE)
    trace = read_trace(path)
    assert trace.path == path
    assert trace.arrivals == (
        Arrival(1, 0.25, 5, None),
        Arrival(3, 0.25, 3, 12),
        Arrival(4, 3.0, 2**24, None),
    )
    assert trace.times == [0.25, 0.25, 3.0]
    assert trace.prompt_lengths == [5, 3, 2**24]
    assert trace.gen_lengths(8) == [8, 12, 8]


@pytest.mark.parametrize(
    ("lengths", "shared"),
    [(("8", "8"), 8), (("8", "4"), None), (("8", "null"), None), (("null", "null"), None)],
)
def test_a_length_is_shared_where_every_line_says_it(
    lengths: tuple[str, str], shared: int | None, tmp_path: Path
):
    lines = [f'{{"at": 1, "prompt_tokens": 2, "gen_length": {length}}}' for length in lengths]
    assert read_trace(written(tmp_path, "\n".join(lines))).shared_gen_length == shared


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not readable as JSON"),
        ("[1, 2]", "expected a JSON object"),
        ('{"prompt_tokens": 4}', "'at' is None, expected seconds from the start of the load, 0 to 604800"),
        ('{"at": -0.5, "prompt_tokens": 4}', "'at' is -0.5"),
        ('{"at": true, "prompt_tokens": 4}', "'at' is True"),
        ('{"at": "1", "prompt_tokens": 4}', "'at' is '1'"),
        ('{"at": NaN, "prompt_tokens": 4}', "'at' is nan"),
        ('{"at": 1e999, "prompt_tokens": 4}', "'at' is inf"),
        ('{"at": 1700000000.0, "prompt_tokens": 4}', "'at' is 1700000000.0"),
        ('{"at": 2}', "'prompt_tokens' is None, expected a positive integer"),
        ('{"at": 2, "prompt_tokens": 0}', "'prompt_tokens' is 0"),
        ('{"at": 2, "prompt_tokens": 4.0}', "'prompt_tokens' is 4.0"),
        ('{"at": 2, "prompt_tokens": 16777217}', "'prompt_tokens' is 16777217, expected at most 16777216"),
        ('{"at": 2, "prompt_tokens": 4, "gen_length": 0}', "'gen_length' is 0"),
        (
            '{"at": 2, "prompt_tokens": 4, "gen_length": 99999999}',
            "'gen_length' is 99999999, expected at most",
        ),
        (
            '{"at": 2, "prompt_tokens": 4, "length": 5}',
            "has a field 'length', expected 'at', 'prompt_tokens', 'gen_",
        ),
        ('{"at": 2, "at": 3, "prompt_tokens": 4}', "key 'at' twice"),
        ('{"at": 0.5, "prompt_tokens": 4}', "'at' is 0.5, earlier than 1 of line 1: sort the lines"),
    ],
)
def test_a_mistake_is_told_with_its_file_and_line(line: str, message: str, tmp_path: Path):
    path = written(tmp_path, f'{{"at": 1, "prompt_tokens": 4}}\n\n{line}\n')
    with pytest.raises(RequestError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 3")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_trace_without_a_line_is_refused(text: str, tmp_path: Path):
    with pytest.raises(RequestError, match=r"trace\.jsonl has no line, expected such as"):
        read_trace(written(tmp_path, text))
    with pytest.raises(RequestError, match=r"missing\.jsonl cannot be read"):
        read_trace(tmp_path / "missing.jsonl")


def test_steps_are_whole_for_every_request(tmp_path: Path):
    trace = read_trace(written(tmp_path, TRACE))
    trace.check_steps(8, 8)
    trace.check_steps(2, 8)  # 12 tokens take 3
    with pytest.raises(RequestError, match=r"line 3: 'gen_length' is 12, .* where 8 tokens take 3"):
        trace.check_steps(3, 8)


def test_the_recorded_bursts_are_what_their_page_draws(capsys: pytest.CaptureFixture[str]):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/bench.md").read_text(), re.S)
    exec(program, {})
    assert capsys.readouterr().out == BURSTS.read_text()


def test_the_recorded_bursts_are_bursts():
    trace = read_trace(BURSTS)
    sizes, begins = [0], [trace.times[0]]
    for at in trace.times:
        if at - begins[-1] >= 2:
            sizes.append(0)
            begins.append(at)
        assert at - begins[-1] < 1
        sizes[-1] += 1
    assert (sum(sizes), len(sizes), trace.shared_gen_length) == (120, 14, 256)
    assert (min(sizes), max(sizes)) == (6, 12)
    assert trace.times[-1] == pytest.approx(122, abs=1)
    short = sum(length < 512 for length in trace.prompt_lengths)
    assert short == pytest.approx(60, abs=3 * 120**0.5 / 2)  # half of a log-uniform draw
    assert 128 <= min(trace.prompt_lengths) <= max(trace.prompt_lengths) <= 2048
