import json
import math
import shutil

import pytest

from jdllm.checkpoints.loading import read_index
from jdllm.checkpoints.native import read_manifest
from jdllm.errors import CheckpointError, ConfigError, JdllmError
from jdllm.json_files import numbered_lines, read_object
from jdllm.models.hf_config import config_from_checkpoint, config_from_hf
from tests.helpers import Golden

DEEP = b"[" * 200_000


def test_an_object_is_read_as_python_reads_it(tmp_path):
    values = {"a": [1, -2.5, None, True, "\u00e4"], "b": {"c": {}}, "big": 10**30}
    (tmp_path / "x.json").write_text(json.dumps(values))
    assert read_object(tmp_path / "x.json") == values


@pytest.mark.parametrize("number", ["1" + "0" * 400, "9" * 5000, "-" + "9" * 5000, "1e400"])
def test_a_number_beyond_the_range_of_a_float_is_infinite(tmp_path, number):
    (tmp_path / "x.json").write_text(f'{{"a": {number}}}')
    assert abs(read_object(tmp_path / "x.json")["a"]) == math.inf


@pytest.mark.parametrize("error", [CheckpointError, ConfigError])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (DEEP, "nests too deeply"),
        (b'{"a": ' * 200_000, "nests too deeply"),
        (b"", "Expecting value"),
        (b"{", "not readable as JSON"),
        (b"[1, 2]", "holds a list"),
        (b"null", "holds a NoneType"),
        (b"\xff\xfe", "no UTF-8"),
        (b'{"a": 1, "b": {"size": 1, "size": 2}}', "key 'size' twice"),
    ],
)
def test_anything_else_is_one_line_that_names_the_file(tmp_path, content, reason, error):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(error, match=reason) as raised:
        read_object(path, error)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_object(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("config.json", config_from_hf),
        ("model.safetensors.index.json", read_index),
        ("manifest.json", read_manifest),
        ("generation_config.json", config_from_checkpoint),
    ],
)
def test_every_file_of_a_checkpoint_is_read_so(tmp_path, name, reader):
    if name == "generation_config.json":
        shutil.copy(Golden("llada").directory / "config.json", tmp_path)
    (tmp_path / name).write_bytes(DEEP)
    with pytest.raises(JdllmError, match=f"{name} is not readable as JSON: it nests too deeply"):
        reader(tmp_path)


def test_lines_have_their_numbers_and_end_at_line_feeds_only(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes('\ufeff{}\r\n \n\n{"a": "b\u2028c\rd"}'.encode())
    lines = [(number, line.strip()) for number, line in numbered_lines(path)]
    assert lines == [(1, "{}"), (4, '{"a": "b\u2028c\rd"}')]


def test_lines_of_what_is_no_file_of_text_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"{}\n\xff\n")
    for name, reason in (
        ("x.jsonl", "is no UTF-8 text"),
        ("y.jsonl", "cannot be read"),
        ("", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=f"{name} {reason}"):
            list(numbered_lines(tmp_path / name, ConfigError))
