"""What a kill, a full disk or a changed source leaves, and how the next run continues."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from jdllm.checkpoints.conversion import to_hf, to_native
from jdllm.checkpoints.native import compare_checksums, read_manifest
from jdllm.errors import CheckpointError
from jdllm.models.hf_config import config_from_hf
from tests.convert.helpers import contents, tensors_of
from tests.helpers import Golden

ROOT = Path(__file__).parents[2]
CONFIG = config_from_hf(Golden("llada").directory)


@contextlib.contextmanager
def small_files_only() -> Iterator[None]:
    """The system refuses to write beyond 20 000 bytes of a file, in the middle of a tensor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_error_leaves_no_checkpoint(tmp_path, source, native):
    for run, origin, name in ((to_native, source, "to"), (to_hf, native, "back")):
        target = tmp_path / name
        with small_files_only(), pytest.raises(CheckpointError, match=f"File too large.*{target}.partial$"):
            run(origin, target)
        assert not target.exists()
        run(origin, target)
    assert contents(tmp_path / "to") == contents(native)
    assert tensors_of(tmp_path / "back") == tensors_of(source)


def test_a_source_that_shrinks_leaves_no_checkpoint(tmp_path, source):
    last = max(source.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=f"{last} ended too early"):
        to_native(source, tmp_path / "native", progress=lambda *_: os.truncate(last, 500))
    assert not (tmp_path / "native").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from jdllm.checkpoints import conversion
calls = 0
def die(done, total):
    global calls
    calls += 1
    if calls == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
getattr(conversion, sys.argv[1])(Path(sys.argv[2]), Path(sys.argv[3]), progress=die)
"""


def kill(function: str, source: Path, target: Path, after: int) -> None:
    """Convert in another process, which is killed when so many parts are complete."""
    command = [sys.executable, "-c", KILLED, function, str(source), str(target), str(after)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL


def written(directory: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file's last write."""
    stats = {path: path.stat() for path in directory.rglob("*") if path.is_file()}
    return {str(path.relative_to(directory)): (s.st_ino, s.st_mtime_ns) for path, s in stats.items()}


def test_a_killed_conversion_continues(tmp_path, source, native):
    target, partial = tmp_path / "target", tmp_path / "target.partial"
    kill("to_native", source, target, 8)
    assert not target.exists()
    complete = {path: state for path, state in written(partial).items() if "conversion" not in path}
    assert len(complete) == 8
    # A kill may also come in the middle of a tensor and of its line in the journal.
    following = read_manifest(native).tensors[8]
    (partial / following.chunk).parent.mkdir(exist_ok=True)
    (partial / following.chunk).write_bytes(b"cut")
    with (partial / ".conversion" / "journal.jsonl").open("a") as journal:
        journal.write(f'["{following.name}", {{"fi')
    calls = []
    to_native(source, target, progress=lambda *call: calls.append(call))
    assert contents(target) == contents(native)
    assert written(target).items() >= complete.items()
    assert calls[-1] == (calls[-1][1], calls[-1][1])
    assert not partial.exists()


def test_a_killed_conversion_back_continues(tmp_path, source, native):
    target, partial = tmp_path / "target", tmp_path / "target.partial"
    kill("to_hf", native, target, 2)
    complete = {path: state for path, state in written(partial).items() if "conversion" not in path}
    assert len(complete) == 2
    to_hf(native, target)
    assert tensors_of(target) == tensors_of(source)
    assert written(target).items() >= complete.items()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["weights", "time", "config", "dtype", "direction"])
def test_another_conversion_does_not_continue(tmp_path, source, native, change):
    target = tmp_path / "target"
    kill("to_native", source, target, 8)
    (tmp_path / "target.partial" / "stale").touch()
    dtype, file = "auto", min(source.glob("*.safetensors"))
    if change == "weights":
        shutil.rmtree(source)
        config = llada_hf_config(CONFIG)
        write_random_checkpoint(source, config, shard_bytes=50_000, seed=1)
    elif change == "time":
        os.utime(file, ns=(0, 0))
    elif change == "config":
        values = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 1e-6}))
    elif change == "dtype":
        dtype = "float32"
    if change == "direction":
        to_hf(native, target)
        assert tensors_of(target) == tensors_of(source)
    else:
        to_native(source, target, dtype=dtype)
        to_native(source, tmp_path / "expected", dtype=dtype)
        assert contents(target) == contents(tmp_path / "expected")
    assert not (target / "stale").exists()


def test_a_part_that_was_lost_is_written_again(tmp_path, source, native):
    """After a power failure a file may be gone or empty although the journal has its line."""
    target, partial = tmp_path / "target", tmp_path / "target.partial"
    kill("to_native", source, target, 8)
    files = sorted(path for path in partial.rglob("*.0*") if path.is_file())
    files[0].unlink()
    os.truncate(files[1], 0)
    to_native(source, target)
    assert contents(target) == contents(native)


def test_a_kill_while_replacing_loses_nothing(tmp_path, source, native, monkeypatch):
    """The old directory is moved away before the new one takes its name."""
    target, rename, calls = tmp_path / "target", Path.rename, []
    shutil.copytree(native, target)

    def die_at_the_second(path: Path, to: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            to_native(source, target, dtype="float32", overwrite=True)
    assert not target.exists()
    to_native(source, target, dtype="float32", overwrite=True)
    assert read_manifest(target).dtype == "float32"
    compare_checksums(target)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "whole", "target"}
