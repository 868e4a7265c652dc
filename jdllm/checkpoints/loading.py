"""Hugging Face checkpoints: where they are, what they hold, and the way into the stacked buffers.

Sizes are counted in bytes. A checkpoint is checked from its headers alone; then every tensor is read in
pieces that are written in place on the device, so that the host holds a few pieces at a time.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from jdllm.checkpoints import native
from jdllm.checkpoints.byte_progress import Progress, reporter
from jdllm.checkpoints.foreign import HUB_FILES, NEVER_READ, check_directory, checkpoint_at
from jdllm.checkpoints.gguf.tensors import read_gguf_index
from jdllm.checkpoints.index import DTYPES, READABLE, Index, StoredTensor, listed, read_safetensors_index
from jdllm.checkpoints.merging import merged
from jdllm.checkpoints.quantised.formats import dequantised
from jdllm.checkpoints.shards import allocate, needed
from jdllm.errors import CheckpointError, ConfigError
from jdllm.gguf_files import is_gguf
from jdllm.host_memory import to_host
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import read_config
from jdllm.models.quantization import quantization_of, stored_form
from jdllm.models.registry import FAMILIES
from jdllm.models.weights import HOST_LAYERS, Params, TensorSpec, Tree, is_spec, spec_tree
from jdllm.quantised import KINDS, Quantised, WeightForm

PIECE_BYTES = 8 << 20
"""Bytes that are read from a file at a time, or one row."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_COMPUTED = (".rotary_emb.inv_freq",)


def resolve(model: str | Path) -> Path:
    """Find a checkpoint, downloading it where `model` is a hub id.

    Arguments:
    - `model`: a local directory, GGUF file, or hub id "organisation/name". A string that starts with ".", "/"
      or "~", or has any other number of slashes, is only ever a path.

    Returns the directory, of a hub checkpoint in the hub's cache, or the GGUF file that has the weights.

    Raises `CheckpointError` if there is no such directory, the hub does not give the checkpoint, or the path
    holds something else, as `jdllm.checkpoints.foreign` says.
    """
    try:
        path = Path(model).expanduser()
        if path.exists():
            return checkpoint_at(path)
    except (OSError, RuntimeError) as e:
        raise CheckpointError(f"{str(model)[:200]!r} cannot be opened as a directory: {e}") from None
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"no directory {path}: expected that of a Hugging Face checkpoint, or a hub id like org/name"
        )
    import huggingface_hub

    try:
        downloaded = huggingface_hub.snapshot_download(
            model, allow_patterns=list(HUB_FILES), ignore_patterns=list(NEVER_READ)
        )
    except Exception as e:  # its own errors, and those of the system and of its HTTP library
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(
            f"there is no directory {model}, and the hub does not give a model of that id: {reason}"
        ) from None
    check_directory(Path(downloaded))
    return Path(downloaded)


def read_index(directory: Path) -> Index:
    """Read which tensors a checkpoint holds, from the headers of its files alone.

    Arguments:
    - `directory`: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names, or is
      a native checkpoint (`jdllm.checkpoints.native`); a GGUF file may take its place.

    Returns every tensor by its Hugging Face name. Quantised weights are `PackedTensor`s of 16 or 32 bits, and
    `QuantisedTensor`s in a native checkpoint.

    Raises `CheckpointError` for files that are missing, truncated or damaged, for tensors that the index
    promises and no file holds, for quantised weights in a form that is not followed, and for a native
    checkpoint whose `config.json` is of one in another form.
    """
    if is_gguf(directory):
        return read_gguf_index(directory)
    values = read_config(directory) if (directory / "config.json").is_file() else {}
    if native.is_native(directory):
        index, form = native.read_index(directory), stored_form(values)
        found = {one for one in KINDS for stored in index.values() if stored.numbers_in(one) is not None}
        if {form} - {None} != found:
            told = "says nothing of matrices in few bits" if form is None else f"tells of matrices in {form}"
            raise CheckpointError(
                f"{directory / 'config.json'} {told} (quantization_config), unlike"
                f" {native.MANIFEST}: one of the two is of another checkpoint"
            )
        return index
    index = read_safetensors_index(directory)
    quantization = quantization_of(values, "config.json")
    return index if quantization is None else dequantised(index, quantization)


def check(config: ModelConfig, index: Index) -> None:
    """Compare a checkpoint's tensors with the model's, all at once.

    Arguments:
    - `config`: the model.
    - `index`: the stored tensors.

    Tolerated are rotary frequencies, which are computed, a head that the configuration ties to the embedding,
    and what the family ignores.

    Raises `CheckpointError` that names every missing, unknown and mis-shaped tensor, and every type that
    cannot be loaded (lists are cut after 20 names, and say how many follow).
    """
    expected = {
        name: spec.source_shape for _, spec in _leaves(spec_tree(config)) for name, _ in spec.sources()
    }
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in index]
    unknown = [name for name in index if name not in expected and not _redundant(config, name)]
    shapes, types = [], []
    for name in expected.keys() & index.keys():
        stored = index[name]
        if stored.shape != expected[name]:
            shapes.append(f"{name} is {list(stored.shape)}, expected {list(expected[name])}")
        if stored.dtype not in DTYPES:
            types.append(f"{name} is {stored.dtype}")
    kinds = (
        ("missing", missing),
        ("unknown", unknown),
        ("of another shape", sorted(shapes)),
        (f"of another type than {', '.join(DTYPES)}", sorted(types)),
    )
    problems = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds if names]
    if problems:
        files = [stored.file.parent for stored in index.values()]
        where = os.path.commonpath(files) if files else "the checkpoint"
        raise CheckpointError(
            f"tensors of {where} do not fit its config.json ({config.family}): " + "; ".join(problems)
        )


def check_tied_head(config: ModelConfig, index: Index) -> None:
    """Compare the bytes of a stored head with the bytes of the embedding that the configuration ties it to.

    Raises `CheckpointError` where they differ: transformers then takes the stored head after all, and a
    reader that follows the configuration takes the embedding.
    """
    names = FAMILIES[config.family].tensor_names
    if not config.tied_head or names["head"] not in index:
        return
    head, embedding = index[names["head"]], index[names["embed"]]
    if (head.shape, head.dtype) == (embedding.shape, embedding.dtype):
        pairs = zip(*(_read_pieces(stored, stored.whole) for stored in (head, embedding)), strict=True)
        if all(a.tobytes() == b.tobytes() for (_, a), (_, b) in pairs):
            return
    raise CheckpointError(
        f"{names['head']} in {head.file} differs from {names['embed']}, and config.json ties them:"
        " say there that they are not tied, or take the head out of the file"
    )


def resolve_dtype(path: str | Path, config: ModelConfig, dtype: str) -> str:
    """The type that weights are loaded in.

    Arguments:
    - `path`, `config`: the checkpoint.
    - `dtype`: "bfloat16", "float16", "float32", or "auto": the type that the configuration states, else the
      one that most of the stored bytes have.

    Returns one of the three names; raises `ConfigError` for any other, and what `read_index` raises.
    """
    if dtype == "auto" and config.dtype is not None:
        dtype = config.dtype
    if dtype == "auto":
        sizes = dict.fromkeys(DTYPES, 0)
        for stored in read_index(Path(path)).values():
            if stored.dtype in sizes:
                sizes[stored.dtype] += stored.bytes
        return DTYPES[max(sizes, key=lambda name: sizes[name])].name
    names = [known.name for known in DTYPES.values()]
    if dtype not in names:
        raise ConfigError(f"dtype is {dtype!r}, expected 'auto' or one of {', '.join(names)}")
    return dtype


def load_params(
    path: str | Path,
    config: ModelConfig,
    dtype: str,
    *,
    progress: bool | Progress = False,
    sharding: Sharding | Params | None = None,
    adapter: Path | None = None,
) -> Params:
    """Load a checkpoint's weights, Hugging Face or native, onto one device or several.

    Every leaf is allocated once and filled in place: no device ever holds more than its own shards. The host
    holds a handful of pieces of at most 8 MiB: less than two tensors of any model whose memory matters. It
    reads no rows and no columns of a tensor that only devices of other processes have. Layers that the model
    has in host memory go there by way of the device, one matrix at a time.

    Arguments:
    - `path`: the directory of the checkpoint.
    - `config`: the model.
    - `dtype`: of the weights on the device, where the cast happens (rounding to nearest even).
    - `progress`: `True` draws a bar on stderr where that is a terminal; a function is called with bytes.
    - `sharding`: of every leaf, or a tree of them by the keys of the parameter tree; a node that is no dict
      holds for all that is below it. The default device takes everything if `None`.
    - `adapter`: a directory of PEFT whose LoRA is merged into the weights as they are read.

    Returns the parameter tree of `jdllm.models.weights.spec_tree`. Values equal the stored ones exactly
    where the types are equal.

    Raises `CheckpointError` for everything that `read_checked_index` finds, before any memory is spent, and
    for a file that shrinks while it is read.
    """
    index = read_checked_index(Path(path), config, adapter)
    specs = spec_tree(config)
    with reporter(progress, _source_bytes(specs, index), "loading weights") as advance:
        return load_tree(specs, index, dtype, sharding, advance)


def read_checked_index(path: Path, config: ModelConfig, adapter: Path | None = None) -> Index:
    """Read which tensors a checkpoint holds, and compare them with the model's.

    Arguments:
    - `path`: the directory of the checkpoint.
    - `config`: the model.
    - `adapter`: a directory of PEFT whose LoRA is merged into the tensors as they are read.

    Raises `CheckpointError` for everything that `read_index`, `merged`, `check` and `check_tied_head` find.
    """
    index = read_index(path)
    if adapter is not None:
        index = merged(index, adapter, config)
    check(config, index)
    check_tied_head(config, index)
    return index


def _source_bytes(specs: Tree[TensorSpec], index: Index) -> int:
    return sum(_own_rows(spec, index[name]).bytes for _, spec in _leaves(specs) for name, _ in spec.sources())


def _own_rows(spec: TensorSpec, stored: StoredTensor) -> StoredTensor:
    """What a leaf has of one of its source tensors."""
    if spec.source_rows is None:
        return stored
    return stored.rows(spec.first_row, spec.shape[1])


def load_tree(
    specs: Tree[TensorSpec],
    index: Index,
    dtype: str,
    sharding: Sharding | Params | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Params:
    """The weights of some leaves; see `load_params`. `advance` is called with the bytes of each tensor."""
    params: Params = {}
    for keys, spec in _leaves(specs):
        node = functools.reduce(lambda tree, key: tree.setdefault(key, {}), keys[:-1], params)
        of_leaf = functools.reduce(lambda n, key: n[key] if isinstance(n, dict) else n, keys, sharding)
        load = _load_into_host if HOST_LAYERS in keys else _load_leaf
        node[keys[-1]] = load(spec, index, dtype, of_leaf, advance)
    return params


def _leaves(specs: Tree[TensorSpec]) -> list[tuple[tuple[str, ...], TensorSpec]]:
    leaves, _ = jax.tree.flatten_with_path(specs, is_leaf=is_spec)
    return [(tuple(key.key for key in path), spec) for path, spec in leaves]


def _load_into_host(
    spec: TensorSpec,
    index: Index,
    dtype: str,
    sharding: Sharding | None,
    advance: Callable[[int], None],
) -> jax.Array | Quantised:
    """A stacked leaf in pinned host memory, which one layer after another reaches from the device."""
    stack: Any = None
    for place, layer in enumerate(spec.layers):
        loaded = jax.device_get(_load_leaf(spec.of_layer(layer), index, dtype, sharding, advance))
        if stack is None:
            stack = jax.tree.map(lambda x: np.empty((len(spec.layers), *x.shape[1:]), x.dtype), loaded)
        for whole, part in zip(*map(jax.tree.leaves, (stack, loaded)), strict=True):
            whole[place] = part[0]
    return to_host(stack, jax.local_devices()[0])


def _load_leaf(
    spec: TensorSpec,
    index: Index,
    dtype: str,
    sharding: Sharding | None,
    advance: Callable[[int], None],
) -> jax.Array | Quantised:
    if spec.quantised:
        return _load_quantised(spec, spec.quantised, index, advance)
    shards = allocate(spec, dtype, sharding)
    for name, place in spec.sources():
        stored = _own_rows(spec, index[name])
        for at, piece in _read_pieces(stored, needed(stored, shards, place)):
            # The last write is awaited only after the next piece was read: both overlap, and two pieces live.
            jax.block_until_ready([shard.buffer for shard in shards])
            block = piece.reshape((1,) * len(place) + piece.shape)
            for shard in shards:
                shard.take(block, (*place, *at))
        advance(stored.bytes)
    buffers = jax.block_until_ready([shard.buffer for shard in shards])
    if sharding is None:
        return buffers[0]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, buffers)


def _load_quantised(
    spec: TensorSpec, form: WeightForm, index: Index, advance: Callable[[int], None]
) -> Quantised:
    """A leaf of matrices of few bits, on the default device, which rounds them as they come: whole rows.
    Numbers that are stored so already keep their values."""
    kept = spec.zeros("float32")
    for name, place in spec.sources():
        stored = _own_rows(spec, index[name])
        values, *others = [stored] if (same := stored.numbers_in(form)) is None else same.parts
        for at, piece in _read_pieces(values, values.whole):
            rows = range(at[0], at[0] + len(piece))
            beside = [other.read([rows, *other.whole[1:]]) for other in others]
            block = jax.device_put([piece, *beside])  # any strides; transposes faster than NumPy
            jax.block_until_ready(kept)
            kept = _write_quantised(kept, form, block, np.array((*place, at[0]), np.int32))
        advance(stored.bytes)
    return jax.block_until_ready(kept)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="form")
def _write_quantised(
    kept: Quantised, form: WeightForm, block: list[jax.Array], start: jax.Array
) -> Quantised:
    """Write rows: those of `start`, which is the place of a matrix and the first of its rows. `block` is the
    rows, or what is stored of them, whose numbers may be in words of 32 bits."""
    kind, (values, *others) = KINDS[form], block
    if values.dtype == jnp.int32:
        values = lax.bitcast_convert_type(values, kept.values.dtype).reshape(len(values), -1)
    part = kind.of_stored(values, *others) if others else kind.of(values)
    *place, row = start

    def write(whole: jax.Array, some: jax.Array) -> jax.Array:
        at = [*place, row, 0] if whole is kept.values else [*place, *[0] * (whole.ndim - len(start)), row]
        return lax.dynamic_update_slice(whole, jnp.expand_dims(some, range(len(place))), at)

    return jax.tree.map(write, kept, part)


def _read_pieces(stored: StoredTensor, part: Sequence[range]) -> Iterator[tuple[list[int], np.ndarray]]:
    """(place in the tensor, values) of the pieces of a part, all of one shape: the last may repeat rows of
    the one before. Columns that are no part of it are not read."""
    rows, *others = part
    row_bytes = math.prod(map(len, others)) * READABLE[stored.dtype].itemsize
    pieces = -(-len(rows) // max(1, PIECE_BYTES // max(1, row_bytes)))
    size = max(1, -(-len(rows) // max(1, pieces)))
    for row in range(rows.start, rows.stop, size):
        row = min(row, rows.stop - size)
        yield [row, *(axis.start for axis in others)], stored.read([range(row, row + size), *others])


def _redundant(config: ModelConfig, name: str) -> bool:
    family = FAMILIES[config.family]
    tied = config.tied_head and name == family.tensor_names["head"]
    return tied or name.endswith(_COMPUTED + family.ignored)
