"""Conversion of Hugging Face checkpoints to native ones and back, one tensor at a time."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jdllm.checkpoints import native
from jdllm.checkpoints.byte_progress import Progress, reporter
from jdllm.checkpoints.calibration.gptq import RANGES
from jdllm.checkpoints.calibration.layers import round_layers
from jdllm.checkpoints.calibration.sequences import Pack, packs_of
from jdllm.checkpoints.index import DTYPES, FILE_INDEX, SINGLE_FILE, Index, listed, read_metadata
from jdllm.checkpoints.loading import read_checked_index, read_index, resolve_dtype
from jdllm.checkpoints.native import Manifest, NativeTensor
from jdllm.checkpoints.peft import CONFIG, WEIGHTS
from jdllm.checkpoints.rounded import PARTS, matrix_of, rounding, stored_shapes
from jdllm.checkpoints.saving import (
    copy_files,
    restate_dtype,
    safetensors_header,
    state_plain_weights,
    state_quantised_weights,
)
from jdllm.checkpoints.staged_chunks import StagedChunks
from jdllm.checkpoints.staging import staged, synced
from jdllm.checkpoints.tokenizer import complete_ids, load_tokenizer
from jdllm.errors import CheckpointError, ConfigError, RequestError
from jdllm.gguf_files import is_gguf
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf, read_config
from jdllm.models.quantization import KEYS
from jdllm.models.weights import LeafPath, TensorSpec, stored_specs
from jdllm.quantised import WeightForm

type Leaves = dict[LeafPath, tuple[TensorSpec, str]]


def to_native(
    source: Path,
    target: Path,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: bool | Progress = False,
    adapter: Path | None = None,
    quantize: WeightForm | None = None,
    calibrate: Sequence[str] | None = None,
) -> Manifest:
    """Convert a Hugging Face checkpoint to a native one (`jdllm.checkpoints.native`).

    The host holds two pieces of 8 MiB at a time, a few where matrices are rounded. A run that was killed or
    met an error is continued by the same call, as long as neither `source`, `adapter`, `calibrate` nor
    jdllm's format has changed.

    Arguments:
    - `source`: the directory of the Hugging Face checkpoint, or a GGUF file; with `quantize` also a native
      checkpoint without matrices in few bits.
    - `target`: the directory to make; it appears when it is complete.
    - `dtype`: "bfloat16", "float16" or "float32" casts every tensor; "auto" keeps each in its type, and casts
      those of a GGUF file to the type that `resolve_dtype` returns.
    - `overwrite`: replace a checkpoint at `target`, at the very end.
    - `progress`: `True` draws a bar on a terminal's stderr; a function is called with bytes.
    - `adapter`: a directory of PEFT whose LoRA is merged into the weights.
    - `quantize`: the form in which the matrices of layers are stored; the default device rounds those that
      are not in this form already, and `dtype` is for all other weights.
    - `calibrate`: texts that decide, with `quantize`, how these matrices are rounded, by GPTQ
      (`jdllm.checkpoints.calibration`). The device then holds one layer at a time, twice. The host holds
      what the texts are in front of a layer, with and without the rounding.

    Returns the manifest. Bytes equal the source's where the type is kept and no adapter changes them; a cast
    rounds to nearest even. A tied head and rotary frequencies, which the model computes, are left out and
    named in the manifest.

    Raises `ConfigError` and `CheckpointError` for a source that jdllm cannot run, also not in the form of
    `quantize`, before anything is written, and `CheckpointError` for a target that exists or cannot be
    written. With `calibrate` it also raises `RequestError` for texts that are too short, and `ConfigError`
    for a model with experts, without a tokenizer, or without a mask that it needs.
    """
    if native.is_native(source) and (quantize is None or native.read_manifest(source).quantised):
        told = "" if quantize is None else ", with matrices in few bits: quantize what it was made from"
        raise CheckpointError(f"{source} is a native checkpoint already{told}")
    if calibrate is not None and quantize not in RANGES:
        raise RequestError(f"calibrate is for quantize {' or '.join(RANGES)}, and quantize is {quantize}")
    _refuse_overlap(source, target)
    config = config_from_hf(source).quantised(quantize)
    if calibrate is not None and config.moe is not None:
        raise ConfigError(
            "calibrate is given, which is for models without experts, and a layer of this one has"
            f" {config.moe.experts}"
        )
    index = read_checked_index(source, config, adapter)
    loaded = resolve_dtype(source, config, dtype)
    leaves = _leaves(config, index, None if dtype == "auto" and not is_gguf(source) else loaded)
    packs = None if calibrate is None else _calibration_packs(source, config, calibrate)
    origin, whole = _origin(source, index), index
    if quantize is not None:
        in_few_bits = (spec for spec in stored_specs(config).values() if spec.quantised)
        names = [name for spec in in_few_bits for name, _ in spec.sources()]
        index = index | rounding(index, names, quantize)
    plan = _plan(leaves, index, origin)
    identity = _identity(source, index, adapter)
    job = {"to": native.FORMAT, "version": native.FORMAT_VERSIONS[quantize is not None]}
    job |= {"dtype": dtype, "quantize": quantize, "source": identity}
    if packs is not None:
        job["calibrate"] = hashlib.sha256(
            b"".join(map(np.ndarray.tobytes, jax.tree.leaves(packs)))
        ).hexdigest()
    with staged(target, job, overwrite=overwrite) as stage:
        chunks = StagedChunks(stage, plan)
        if packs is not None:
            round_layers(whole, config, loaded, packs, chunks, progress)
        with reporter(progress, sum(index[tensor.name].bytes for tensor in plan), "converting") as advance:
            for tensor in plan:
                chunks.write(tensor.name, index[tensor.name])
                advance(index[tensor.name].bytes)
        tensors = chunks.described()
        native.write_orbax_metadata(stage.directory, leaves)
        copy_files(source, stage.directory)
        state_plain_weights(stage.directory)
        if quantize is not None:
            state_quantised_weights(stage.directory, quantize)
        if config.dtype not in (None, loaded):
            restate_dtype(stage.directory, loaded)
        files = {file: origin.metadata[file] for file in dict.fromkeys(t.file for t in tensors)}
        omitted = {*index, *origin.omitted} - {tensor.name for tensor in tensors}
        manifest = Manifest(config.family, loaded, tuple(tensors), files, tuple(sorted(omitted)))
        native.write_manifest(stage.directory, manifest)
    return manifest


def to_hf(
    source: Path, target: Path, *, overwrite: bool = False, progress: bool | Progress = False
) -> Manifest:
    """Convert a native checkpoint back to the safetensors files that it came from.

    Files have the names and tensors of the original ones, in the same order; with the types kept, those that
    the safetensors library wrote come out equal byte by byte. Matrices in few bits come out as the numbers
    that they stand for, in the type of the other weights. The host holds one piece of 8 MiB at a time, of
    these matrices a few.

    Arguments:
    - `source`: the directory of the native checkpoint.
    - `target`: the directory to make; it appears when it is complete. A killed run continues
      with its next file.
    - `overwrite`: replace a checkpoint at `target`, at the very end.
    - `progress`: `True` draws a bar on a terminal's stderr; a function is called with bytes.

    Returns the manifest of `source`, with these matrices as they come out.

    Raises `CheckpointError` for a source that is not native or damaged (every checksum is compared), and for
    a target that exists or cannot be written.
    """
    if not native.is_native(source):
        raise CheckpointError(f"{source} is no native checkpoint: it has no {native.MANIFEST}")
    _refuse_overlap(source, target)
    manifest, index = native.read_manifest(source), read_index(source)
    if quantised := manifest.quantised:
        native.compare_checksums(source)
        manifest = manifest.plain()
    files: dict[str, list[NativeTensor]] = {}
    for tensor in manifest.tensors:
        files.setdefault(tensor.file, []).append(tensor)
    identity = hashlib.sha256((source / native.MANIFEST).read_bytes()).hexdigest()
    with staged(target, {"to": "hf", "source": identity}, overwrite=overwrite) as stage:
        with reporter(progress, manifest.bytes, "converting") as advance:
            for file, tensors in files.items():
                if not stage.has(file):
                    _write_safetensors(stage.directory / file, tensors, index, manifest.files[file])
                    stage.record(file, file)
                advance(sum(tensor.bytes for tensor in tensors))
        if files.keys() != {SINGLE_FILE}:
            weight_map = {tensor.name: tensor.file for tensor in manifest.tensors}
            content = {"metadata": {"total_size": manifest.bytes}, "weight_map": weight_map}
            (stage.directory / FILE_INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        copy_files(source, stage.directory)
        if quantised:
            state_plain_weights(stage.directory)
    return manifest


def _calibration_packs(source: Path, config: ModelConfig, texts: Sequence[str]) -> list[Pack]:
    """Texts as the model sees them while it generates."""
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise ConfigError(f"{source} has no tokenizer (tokenizer.json): no text can calibrate this model")
    config = complete_ids(config, tokenizer)
    if not config.in_order and config.mask_id is None:
        raise ConfigError(
            f"{source} states no mask_token_id, and its tokenizer has no such token: calibrating masks tokens"
        )
    return packs_of(texts, functools.partial(tokenizer.encode, parse_special=True), config)


def _refuse_overlap(source: Path, target: Path) -> None:
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise CheckpointError(f"{target} is or contains the source {source}: give another name")


def _leaves(config: ModelConfig, index: Index, cast: str | None) -> Leaves:
    """Every stored leaf with its type, in the words of a safetensors header.

    Rows of the same tensors are one leaf, such as "q_k_v". Matrices in few bits are one for each part.
    """
    names = {dtype.name: name for name, dtype in DTYPES.items()}
    leaves: Leaves = {}
    mixed = []
    for paths, spec in stored_specs(config).items():
        path = (*paths[0][:-1], "_".join(path[-1] for path in paths))
        if spec.quantised:
            shapes = stored_shapes(spec.shape, spec.quantised)
            for part, shape in zip(PARTS[spec.quantised], shapes, strict=True):
                axes, source = spec.axes[: len(shape)], spec.source + part.suffix
                own = dataclasses.replace(spec, shape=shape, axes=axes, source=source)
                leaves[(*path, part.name)] = own, part.dtype
            continue
        types = {index[name].dtype for name, _ in spec.sources()}
        leaves[path] = (spec, names[cast] if cast else min(types))
        if len(types) > 1 and not cast:
            mixed.append(f"{'.'.join(path)} ({', '.join(sorted(types))})")
    if mixed:
        raise ConfigError(f"tensors that are stacked have several types, so give a dtype: {listed(mixed)}")
    return leaves


def _identity(source: Path, index: Index, adapter: Path | None) -> str:
    """Changes when the configuration, a weight file or the adapter does, as far as sizes and times of change
    tell."""
    files = {stored.file for stored in index.values()}
    files |= set() if adapter is None else {adapter / CONFIG, adapter / WEIGHTS}
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    return hashlib.sha256(json.dumps([states, read_config(source)]).encode()).hexdigest()


class _Origin(NamedTuple):
    """The safetensors files that a checkpoint has, or came from.

    - `files`: the file of each tensor, in the order of their places, in which they are read once from front
      to back.
    - `metadata`: what each file says beside its tensors.
    - `omitted`: tensors that these files had and the checkpoint has not.
    """

    files: dict[str, str]
    metadata: dict[str, dict[str, str]]
    omitted: tuple[str, ...] = ()


def _origin(source: Path, index: Index) -> _Origin:
    """Where the tensors of a checkpoint are from."""
    if native.is_native(source):
        manifest = native.read_manifest(source)
        return _Origin({x.name: x.file for x in manifest.tensors}, manifest.files, manifest.omitted)
    in_order = sorted(index, key=lambda name: (index[name].file, index[name].offset))
    if is_gguf(source):
        return _Origin(dict.fromkeys(in_order, SINGLE_FILE), {SINGLE_FILE: {"format": "pt"}})
    files = {name: index[name].file.name for name in in_order}
    metadata = {file: read_metadata(source / file) for file in dict.fromkeys(files.values())}
    if any(key in read_config(source) for key in KEYS):
        # The rest is of quantised weights, and does not hold for plain ones.
        metadata = {file: {key: x[key] for key in ("format",) if key in x} for file, x in metadata.items()}
    return _Origin(files, metadata)


def _plan(leaves: Leaves, index: Index, origin: _Origin) -> list[NativeTensor]:
    """All tensors in the order of their places in the source. Scales and offsets are behind their matrix."""
    places = {name: place for place, name in enumerate(origin.files)}
    tensors = [
        (matrix_of(name), name, dtype, native.chunk_of(path, spec, place))
        for path, (spec, dtype) in leaves.items()
        for name, place in spec.sources()
    ]
    return [
        NativeTensor(name, dtype, index[name].shape, origin.files[matrix], chunk)
        for matrix, name, dtype, chunk in sorted(tensors, key=lambda entry: places[entry[0]])
    ]


def _write_safetensors(
    path: Path, tensors: list[NativeTensor], index: Index, metadata: dict[str, str]
) -> None:
    with synced(path) as out:
        out.write(safetensors_header(((t.name, t.dtype, t.shape) for t in tensors), metadata))
        for tensor in tensors:
            if native.stream(index[tensor.name], out.write) != tensor.sha256 != "":
                raise CheckpointError(
                    f"{index[tensor.name].file} ({tensor.name}) is damaged: its checksum differs"
                )
