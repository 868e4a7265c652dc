"""Native checkpoints: the stacked weights as a directory that Orbax restores, beside what Hugging Face needs.

A leaf of the spec tree is an uncompressed zarr array whose chunks are single Hugging Face tensors. The file
of a chunk therefore holds exactly the bytes of its tensor, and loading reads it as it reads a safetensors
file. `manifest.json` names every tensor with its chunk and SHA-256, and the safetensors file it came from.
`config.json` and the tokenizer's files lie beside it under their own names.

A leaf of matrices in few bits is an array for each part, such as `values` and `scales`
(`jdllm.checkpoints.rounded`). Their tensors are entries of the manifest, too. The inputs of a row are in
their natural order.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jdllm import __version__
from jdllm.checkpoints.byte_progress import Progress, reporter
from jdllm.checkpoints.index import DTYPES, READABLE, Index, StoredTensor, header_name, listed
from jdllm.checkpoints.rounded import SUFFIXES, VALUES, matrices, matrix_shape
from jdllm.errors import CheckpointError
from jdllm.json_files import read_object
from jdllm.models.weights import TensorSpec

FORMAT = "jdllm-native"
FORMAT_VERSIONS = (1, 2)
"""Of checkpoints without matrices in few bits, and with."""

MANIFEST = "manifest.json"

_ORBAX_TREE = "_METADATA"
_PIECE_BYTES = 8 << 20
_ZARR_TYPES = {
    "BF16": "bfloat16",
    "F16": "<f2",
    "F32": "<f4",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "|i1",
    "U8": "|u1",
}


@dataclasses.dataclass(frozen=True)
class NativeTensor:
    """One Hugging Face tensor of a native checkpoint, or the scales or offsets of one in few bits.

    - `name`, `dtype`, `shape`: the entries of a safetensors header, such as "BF16" for the type.
    - `file`: the safetensors file that it belongs to.
    - `chunk`: the file in the native checkpoint that holds its bytes, relative to the directory.
    - `sha256`: of its bytes, in hexadecimal; empty before they are written, and for a matrix that is stored
      otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    chunk: str
    sha256: str = ""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * READABLE[self.dtype].itemsize

    def stored(self, directory: Path) -> StoredTensor:
        return StoredTensor(directory / self.chunk, self.dtype, self.shape, 0)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says.

    - `family`, `dtype`: of the model, and the type that "auto" loads it in.
    - `tensors`: in the order of their places in the safetensors files.
    - `files`: safetensors file -> the `__metadata__` of its header.
    - `omitted`: tensors of the source that the model does not have (`jdllm.checkpoints.loading.check`).
    """

    family: str
    dtype: str
    tensors: tuple[NativeTensor, ...]
    files: dict[str, dict[str, str]]
    omitted: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def quantised(self) -> bool:
        """Whether some matrices are in few bits."""
        return any(tensor.dtype in VALUES for tensor in self.tensors)

    def plain(self) -> "Manifest":
        """The same checkpoint with those matrices in its `dtype`."""
        names = {tensor.name for tensor in self.tensors if tensor.dtype in VALUES}
        others = {name + suffix for name in names for suffix in SUFFIXES}
        dtype = header_name(self.dtype)

        def wide(tensor: NativeTensor) -> NativeTensor:
            if tensor.name not in names:
                return tensor
            shape = matrix_shape(tensor.dtype, tensor.shape)
            return dataclasses.replace(tensor, dtype=dtype, shape=shape, sha256="")

        tensors = tuple(wide(tensor) for tensor in self.tensors if tensor.name not in others)
        return dataclasses.replace(self, tensors=tensors)


def is_native(directory: Path) -> bool:
    """Tells a native checkpoint from any other directory, without reading it."""
    return (directory / MANIFEST).is_file() and (directory / _ORBAX_TREE).is_file()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a native checkpoint.

    Raises `CheckpointError` for a manifest that is unreadable, malformed, or of a later format.
    """
    path = directory / MANIFEST
    values = read_object(path)
    try:
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, not {FORMAT!r}")
        if values["version"] in FORMAT_VERSIONS:
            return _parse(values)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise CheckpointError(f"{path} is no manifest of a native checkpoint: {e!r}") from None
    raise CheckpointError(
        f"{path} has format version {values['version']!r}, and this jdllm reads"
        f" {' and '.join(map(str, FORMAT_VERSIONS))}: it was written by jdllm {values.get('jdllm')}"
    )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, which makes `directory` a native checkpoint."""
    version = FORMAT_VERSIONS[manifest.quantised]
    head = {"format": FORMAT, "version": version, "jdllm": __version__, "checksum": "sha256"}
    (directory / MANIFEST).write_text(json.dumps(head | dataclasses.asdict(manifest), indent=1))


def read_index(directory: Path) -> Index:
    """Read which tensors a native checkpoint holds, by their Hugging Face names.

    Returns a `QuantisedTensor` for each matrix in few bits.

    Raises `CheckpointError` for what `read_manifest` refuses, for chunks that are missing or of another
    length, and for a matrix in few bits without scales; the content of chunks is compared by
    `compare_checksums` only.
    """
    manifest = read_manifest(directory)
    index = _chunks(directory, manifest)
    return matrices(index, header_name(manifest.dtype)) if manifest.quantised else index


def _chunks(directory: Path, manifest: Manifest) -> Index:
    index = {tensor.name: tensor.stored(directory) for tensor in manifest.tensors}
    damaged = [
        f"{stored.file.relative_to(directory)} ({name})"
        for name, stored in index.items()
        if not stored.file.is_file() or stored.file.stat().st_size != stored.bytes
    ]
    if damaged:
        raise CheckpointError(f"{directory} has missing or mis-sized chunks: {listed(damaged)}")
    return index


def compare_checksums(directory: Path, *, progress: bool | Progress = False) -> Manifest:
    """Read every byte of a native checkpoint's weights and compare the checksums of the manifest.

    Arguments:
    - `directory`: the native checkpoint.
    - `progress`: `True` draws a bar on a terminal's stderr; a function is called with bytes.

    Returns the manifest.

    Raises `CheckpointError` that names the damaged tensors.
    """
    if not is_native(directory):
        raise CheckpointError(f"{directory} is no native checkpoint: it has no {MANIFEST} and {_ORBAX_TREE}")
    manifest = read_manifest(directory)
    index, damaged = _chunks(directory, manifest), []
    with reporter(progress, manifest.bytes, "verifying") as advance:
        for tensor in manifest.tensors:
            if stream(index[tensor.name], lambda _: None) != tensor.sha256:
                damaged.append(f"{tensor.name} in {tensor.chunk}")
            advance(tensor.bytes)
    if damaged:
        raise CheckpointError(f"{directory} is damaged: checksums differ for {listed(damaged)}")
    return manifest


def stream(stored: StoredTensor, write: Callable[[bytes | memoryview], Any], dtype: str | None = None) -> str:
    """Hand the bytes of a tensor over in pieces of at most 8 MiB.

    Arguments:
    - `stored`: the tensor.
    - `write`: called with each piece.
    - `dtype`: what the values are cast to (rounding to nearest even), in the words of a safetensors header;
      theirs if `None`.

    Returns the SHA-256 of all bytes, in hexadecimal.
    """
    digest = hashlib.sha256()
    for piece in _pieces(stored):
        if dtype not in (None, stored.dtype):
            with np.errstate(over="ignore"):
                piece = piece.astype(DTYPES[dtype])
        data = piece.view(np.uint8).data
        digest.update(data)
        write(data)
    return digest.hexdigest()


def chunk_of(path: tuple[str, ...], spec: TensorSpec, place: tuple[int, ...]) -> str:
    """The file of the chunk that holds the source tensor at `place` of the leaf at `path`."""
    coordinates = place + (0,) * (len(spec.shape) - len(place))
    return f"{'.'.join(path)}/{'.'.join(map(str, coordinates))}"


def write_orbax_metadata(directory: Path, leaves: Mapping[tuple[str, ...], tuple[TensorSpec, str]]) -> None:
    """Write what Orbax and zarr (version 2) need to read the chunks in `directory` as arrays.

    Arguments:
    - `directory`: of the native checkpoint; leaves' directories exist in it.
    - `leaves`: path in the parameter tree -> (spec, type in the words of a safetensors header).
    """
    tree = {}
    for path, (spec, dtype) in leaves.items():
        stacking = len(spec.shape) - len(spec.source_shape)
        array = {
            "zarr_format": 2,
            "shape": spec.shape,
            "chunks": (*[1] * stacking, *spec.shape[stacking:]),
            "dtype": _ZARR_TYPES[dtype],
            "order": "F" if spec.transposed else "C",
            "compressor": None,
            "filters": None,
            "fill_value": None,
            "dimension_separator": ".",
        }
        (directory / ".".join(path) / ".zarray").write_text(json.dumps(array))
        # As NumPy arrays: Orbax then needs no sharding of the machine that wrote them.
        value = {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": spec.shape}
        keys = [{"key": key, "key_type": 2} for key in path]
        tree[str(path)] = {"key_metadata": keys, "value_metadata": value}
    handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    metadata = {
        _ORBAX_TREE: {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        },
        "_CHECKPOINT_METADATA": {"item_handlers": handler, "metrics": {}, "performance_metrics": {}},
    }
    for name, values in metadata.items():
        (directory / name).write_text(json.dumps(values))


def _parse(values: Mapping[str, Any]) -> Manifest:
    fields = {field.name for field in dataclasses.fields(NativeTensor)}
    types, tensors = {*DTYPES} | (VALUES if values["version"] > 1 else set()), []
    for entry in values["tensors"]:
        tensor = NativeTensor(**{**{name: entry[name] for name in fields}, "shape": tuple(entry["shape"])})
        outside = PurePosixPath(tensor.chunk).is_absolute() or ".." in PurePosixPath(tensor.chunk).parts
        if outside or Path(tensor.file).name != tensor.file:
            raise ValueError(f"{tensor.name!r} lies outside the directory")
        if tensor.dtype not in types or not all(isinstance(n, int) and n > 0 for n in tensor.shape):
            raise ValueError(f"{tensor.name!r} is {tensor.dtype} {tensor.shape}")
        tensors.append(tensor)
    files = {str(name): dict(metadata) for name, metadata in values["files"].items()}
    if lost := {tensor.file for tensor in tensors} - files.keys():
        raise ValueError(f"it lacks the files {sorted(lost)}")
    if values["dtype"] not in [known.name for known in DTYPES.values()]:
        raise ValueError(f"its dtype is {values['dtype']!r}")
    return Manifest(values["family"], values["dtype"], tuple(tensors), files, tuple(values["omitted"]))


def _pieces(stored: StoredTensor) -> Iterator[np.ndarray]:
    """The values in order, flat."""
    rows, *others = stored.whole
    row_bytes = math.prod(stored.shape[1:]) * READABLE[stored.dtype].itemsize
    size = max(1, _PIECE_BYTES // max(1, row_bytes))
    for row in range(0, len(rows), size):
        yield stored.read([range(row, min(row + size, len(rows))), *others]).reshape(-1)
