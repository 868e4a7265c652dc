"""Which tensors a Hugging Face checkpoint holds and where they lie, from the headers of its files alone."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jdllm.errors import CheckpointError
from jdllm.json_files import parse_object, read_object
from jdllm.quantised import WeightForm

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in (("BF16", jnp.bfloat16), ("F16", jnp.float16), ("F32", jnp.float32))
}
"""Stored types that can be loaded, by their name in a safetensors header."""

READABLE: dict[str, np.dtype] = DTYPES | {
    name: np.dtype(dtype)
    for name, dtype in (
        ("F8_E4M3", jnp.float8_e4m3fn),
        ("I64", np.int64),
        ("I32", np.int32),
        ("I8", np.int8),
        ("U8", np.uint8),
    )
}
"""These, and the types of what quantised weights are made of."""

SINGLE_FILE = "model.safetensors"
"""The file of a checkpoint that has no others."""

FILE_INDEX = "model.safetensors.index.json"
"""Names the file of each tensor where there are several."""

_MOST_LISTED = 20


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `dtype` is its type in the words of the header, `offset` its place in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of its data; 0 for a type that cannot be read."""
        return math.prod(self.shape) * (READABLE[self.dtype].itemsize if self.dtype in READABLE else 0)

    @property
    def whole(self) -> list[range]:
        """All of it, along each axis."""
        return [range(size) for size in self.shape]

    def numbers_in(self, form: WeightForm) -> "Numbers | None":
        """What a device keeps of a matrix in this form; `None` where it would have to round the matrix."""
        del form
        return None

    def rows(self, first: int, count: int) -> "StoredTensor":
        """`count` of its rows, from `first` on."""
        before = self.bytes // self.shape[0] * first
        return dataclasses.replace(self, shape=(count, *self.shape[1:]), offset=self.offset + before)

    def read(self, part: Sequence[range]) -> np.ndarray:
        """Some of its rows, of which it may be some columns, and all of further axes.

        Arguments:
        - `part`: what is read along each axis.

        Raises `CheckpointError` for a file that has become shorter.
        """
        if not self.shape:
            return dataclasses.replace(self, shape=(1,)).read([range(1)]).reshape(())
        rows, *others = part
        row_bytes = self.bytes // self.shape[0]
        before = others[0].start * (row_bytes // self.shape[1]) if others else 0
        values = np.empty([len(axis) for axis in part], READABLE[self.dtype])
        at_once = len(rows) if list(values.shape[1:]) != list(self.shape[1:]) else 1
        with self.file.open("rb", buffering=0) as file:
            for i, run in enumerate(values.reshape(at_once, -1)):
                file.seek(self.offset + (rows.start + i) * row_bytes + before)
                if file.readinto(run.view(np.uint8)) != run.nbytes:
                    raise CheckpointError(f"{self.file} ended too early: it was changed while it was read")
        return values


class Numbers(NamedTuple):
    """A matrix in few bits, in the parts that a device keeps.

    - `form`: of the matrix.
    - `values`: as `jdllm.quantised` has them stored, or 32-bit words of these (type I32).
    - `others`: the scales, and the offsets where the form has any, as `jdllm.quantised` has them stored.
    """

    form: WeightForm
    values: StoredTensor
    others: tuple[StoredTensor, ...]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """All that is stored, in the order of the parts of the form."""
        return self.values, *self.others

    def rows(self, first: int, count: int) -> "Numbers":
        """`count` rows of the matrix, from `first` on."""
        values, *others = (part.rows(first, count) for part in self.parts)
        return Numbers(self.form, values, tuple(others))


type Index = dict[str, StoredTensor]


def read_safetensors_index(directory: Path) -> Index:
    """Read which tensors the safetensors files of a checkpoint hold.

    Arguments:
    - `directory`: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names.

    Returns every tensor by its name.

    Raises `CheckpointError` for files that are missing, truncated or damaged, and for tensors that the index
    promises and no file holds.
    """
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE)
    if not (directory / FILE_INDEX).is_file():
        raise CheckpointError(
            f"no {SINGLE_FILE} and no {FILE_INDEX} in {directory}: only safetensors can be loaded"
        )
    file_of = _read_weight_map(directory / FILE_INDEX)
    files = [directory / name for name in sorted(set(file_of.values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{directory} lacks files that {FILE_INDEX} names: {listed(absent)}")
    headers = {file.name: read_header(file) for file in files}
    if lost := [f"{tensor} in {file}" for tensor, file in file_of.items() if tensor not in headers[file]]:
        raise CheckpointError(f"{directory / FILE_INDEX} names tensors that their files lack: {listed(lost)}")
    index: Index = {tensor: stored for header in headers.values() for tensor, stored in header.items()}
    return index | {tensor: headers[file][tensor] for tensor, file in file_of.items()}


def header_name(dtype: str) -> str:
    """What a safetensors header calls "bfloat16", "float16" or "float32"."""
    return next(name for name, known in DTYPES.items() if known.name == dtype)


def listed(names: list[str]) -> str:
    """The names for a message: at most 20 of them, and how many follow."""
    rest = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def read_header(file: Path) -> Index:
    """Read which tensors a safetensors file holds.

    Returns every tensor by its name. Raises `CheckpointError` for a file that is missing, truncated or
    damaged.
    """
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file} is damaged, truncated or no safetensors file: {e}") from None
    header, length = _parsed_header(file)
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_metadata(file: Path) -> dict[str, str]:
    """Read what the writer of a safetensors file says beside its tensors.

    The file is one of an index that was read.
    """
    return _parsed_header(file)[0].get("__metadata__", {})


def _parsed_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and its bytes."""
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        return parse_object(f.read(length), file), length


def _read_weight_map(path: Path) -> Mapping[str, str]:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        reason = "it lacks an object 'weight_map' of tensor and file names"
    elif outside := [file for file in weight_map.values() if Path(file).name != file]:
        reason = f"the file {outside[0]!r} lies outside the directory"
    else:
        return weight_map
    raise CheckpointError(f"{path} is no index of a checkpoint: {reason}")
