"""GGUF files that somebody else wrote: a reader gets what the header says, or one line that says why not.

A model is one file, or a split: files whose names end in `-00001-of-0000N.gguf`. The package `gguf` parses.
"""

import functools
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jdllm.errors import CheckpointError

SUFFIX = ".gguf"

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufTensor(NamedTuple):
    """One tensor of a file.

    - `file`, `offset`: where its data lie.
    - `kind`: how: a `GGMLQuantizationType` of the package `gguf`.
    - `shape`: rows first, as NumPy has it.
    """

    file: Path
    offset: int
    kind: Any
    shape: tuple[int, ...]


class Gguf(NamedTuple):
    """A model: `file` is its first, `values` are the metadata of this, `tensors` those of all files."""

    file: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix == SUFFIX and path.is_file()


def models_in(directory: Path) -> list[Path]:
    """The GGUF files of a directory; of a split the first that is there."""
    found: dict[str, Path] = {}
    for file in sorted(directory.glob(f"*{SUFFIX}")):
        part = _PART.fullmatch(file.name)
        found.setdefault(part["name"] + part["count"] if part else file.name, file)
    return list(found.values())


def read_gguf(path: Path) -> Gguf:
    """Read what the headers of a model say.

    Arguments:
    - `path`: the file, or any file of a split.

    Returns metadata and tensors; a second call for files that have not changed returns the same object.

    Raises `CheckpointError` for files that are missing, damaged or truncated, of another version, in
    big-endian order or with a type of tensors that the package does not know, and without the package.
    """
    files = _files(path)
    states = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    return _read(tuple(files), tuple(states))


def _files(path: Path) -> list[Path]:
    part = _PART.fullmatch(path.name)
    if part is None:
        files = [path]
    else:
        count = part["count"]
        names = (f"{part['name']}-{i:05}-of-{count}{SUFFIX}" for i in range(1, int(count) + 1))
        files = [path.with_name(name) for name in names]
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{path.parent} lacks {', '.join(absent[:20])}")
    return files


@functools.lru_cache(maxsize=4)
def _read(files: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> Gguf:
    headers = [_read_one(file) for file in files]
    first, tensors = headers[0], {}
    count = first.values.get("split.count") or 1
    if count != len(files):
        raise CheckpointError(
            f"{first.file} is one of {count} files of a model: their names must end in"
            f" -00001-of-{count:05}{SUFFIX} and so on"
        )
    for header in headers:
        tensors |= header.tensors
    return Gguf(first.file, first.values, tensors)


def _read_one(file: Path) -> Gguf:
    _check_version(file)
    reader = _reader()
    try:
        found = reader(file)
        values = {name: field.contents() for name, field in found.fields.items()}
        tensors = {
            str(tensor.name): GgufTensor(
                file, int(tensor.data_offset), tensor.tensor_type, tuple(map(int, reversed(tensor.shape)))
            )
            for tensor in found.tensors
        }
    except Exception as e:  # the package meets damage with whatever NumPy raises
        raise CheckpointError(
            f"{file} is damaged or truncated, or unknown to the package gguf: {e}"
        ) from None
    return Gguf(file, values, tensors)


def _check_version(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            begin = opened.read(8)
    except OSError as e:
        raise CheckpointError(f"{file} cannot be read: {e.strerror}") from None
    if begin[:4] != _MAGIC or len(begin) < 8:
        raise CheckpointError(f"{file} is no GGUF file: it does not begin with GGUF and a version")
    [version] = struct.unpack("<I", begin[4:])
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{file} is a GGUF file in big-endian order: jdllm reads little-endian ones")
    if version not in _VERSIONS:
        raise CheckpointError(f"{file} is a GGUF file of version {version}: jdllm reads versions 2 and 3")


def _reader() -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(
            "a GGUF file needs the package gguf: install the extra, as in pip install 'jdllm[gguf]'"
        ) from None

    class Reader(GGUFReader):
        """It slices the file for each entry of a vocabulary: a plain array takes a fraction of the time."""

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = np.asarray(mapped)

    return Reader
