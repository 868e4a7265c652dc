"""A directory that appears when it is complete, and whose making can be continued after a kill."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jdllm.errors import CheckpointError

type Job = dict[str, Any]

_OWN = ".conversion"
_JOURNAL = "journal.jsonl"
_REPLACED = "replaced"


class Stage:
    """Where the parts of a directory are collected, one file each, and which of them are complete.

    - `directory`: the temporary directory.
    """

    def __init__(self, directory: Path, journal: IO[str], done: dict[str, Any]):
        self.directory = directory
        self._journal = journal
        self._done = done

    def record(self, part: str, file: str, value: Any = None) -> None:
        """Note that a part is complete in `file`, which must be `synced`, and JSON that describes it."""
        entry = {"file": file, "size": (self.directory / file).stat().st_size, "value": value}
        self._journal.write(json.dumps([part, entry]) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._done[part] = entry

    def has(self, part: str) -> bool:
        """Tells whether a part is complete, in this run or one before."""
        entry = self._done.get(part)
        if entry is None:
            return False
        file = self.directory / entry["file"]
        return file.is_file() and file.stat().st_size == entry["size"]

    def value(self, part: str) -> Any:
        """The record of a complete part."""
        return self._done[part]["value"]


@contextlib.contextmanager
def staged(target: Path, job: Job, *, overwrite: bool) -> Iterator[Stage]:
    """Collect the parts of `target` in `<target>.partial`, which is renamed when the block ends well.

    Arguments:
    - `target`: a directory that does not exist, or a checkpoint that `overwrite` replaces at the very end.
    - `job`: identifies what is made from what, as JSON. Parts that an earlier run left behind are kept where
      its job was equal, and removed where it was not.

    Yields the `Stage`. After an error the parts stay where they are, for the next run to continue.

    Raises `CheckpointError` for a target or temporary directory that is in the way, for another process that
    makes the same directory, and for every `OSError` of the block.
    """
    target = target.resolve()
    _check_target(target, overwrite)
    partial = target.with_name(f"{target.name}.partial")
    try:
        with contextlib.suppress(OSError):
            partial.rmdir()  # empty, if a kill came before the journal
        if partial.exists() and not (partial / _OWN).is_dir():
            raise CheckpointError(f"{partial} is in the way: it is not from a conversion to {target.name}")
        (partial / _OWN).mkdir(parents=True, exist_ok=True)
        with (partial / _OWN / _JOURNAL).open("a+") as journal:
            _lock(journal, partial)
            done = _read_journal(journal, job)
            if done is None:
                _start(partial, journal, job)
            yield Stage(partial, journal, done or {})
            _publish(partial, target, overwrite)
    except OSError as e:
        place = f" ({e.filename})" if e.filename else ""
        raise CheckpointError(
            f"{target} was not written: {e.strerror or e}{place}; what is complete stays in {partial}"
        ) from None


@contextlib.contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that is on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists: give another name, or replace it (--overwrite, overwrite=True)"
        )
    if not (target / "config.json").is_file():
        raise CheckpointError(f"{target} is no checkpoint, so --overwrite does not replace it")


def _lock(journal: IO[str], partial: Path) -> None:
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"{partial} is being written by another process") from None


def _read_journal(journal: IO[str], job: Job) -> dict[str, Any] | None:
    """The complete parts, or `None` where the journal is of another job.

    A line that a kill cut off is dropped, and its part is made again.
    """
    journal.seek(0)
    lines, size = [], 0
    for line in journal:
        try:
            lines.append(json.loads(line if line.endswith("\n") else ""))
        except ValueError:
            break
        size += len(line)
    if not lines or lines[0] != job:
        return None
    journal.truncate(size)
    return dict(lines[1:])


def _start(partial: Path, journal: IO[str], job: Job) -> None:
    for entry in partial.iterdir():
        if entry.name != _OWN:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    journal.truncate(0)
    journal.write(json.dumps(job) + "\n")
    journal.flush()


def _publish(partial: Path, target: Path, overwrite: bool) -> None:
    """Rename, so that `target` is the old directory or the new one; a kill in between loses neither."""
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    if overwrite and target.exists():
        target.rename(partial / _OWN / _REPLACED)
    partial.rename(target)
    shutil.rmtree(target / _OWN)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
