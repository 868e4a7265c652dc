"""Rounding of a model's matrices, a layer at a time, by the rows that reach each matrix.

The device holds one layer as it was and as it is rounded, the sums of the inputs of one matrix, and one pack
of rows. The host holds the rows of all packs twice: those of the rounded model, and those of the model that
is not rounded. Matrices of a layer are rounded in the order in which rows pass them. Each sees the rows that
the rounded matrices before make, and makes good a part of what these have done.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from jdllm.checkpoints.byte_progress import Progress, reporter
from jdllm.checkpoints.calibration.gptq import compensated, feedback, following
from jdllm.checkpoints.calibration.sequences import Pack
from jdllm.checkpoints.index import Index, header_name
from jdllm.checkpoints.loading import load_tree
from jdllm.checkpoints.rounded import PARTS, HeldTensor, matrices
from jdllm.checkpoints.staged_chunks import StagedChunks
from jdllm.models import leaf
from jdllm.models.block import Hidden, RowInts
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, Layer, Ranges
from jdllm.models.rotary import rotation_at
from jdllm.models.weights import Params, TensorSpec, Tree, layer_specs, spec_tree, stored_specs
from jdllm.pallas.attention import AttentionOutput, attention, merge
from jdllm.quantised import KINDS, WeightForm

_SHARING = {"q": ("q", "k", "v"), "o": ("o",), "gate": ("gate", "up"), "down": ("down",)}
"""Matrices that multiply the same rows, by the first of them, in the order in which rows pass them."""

MADE_GOOD = 0.5
"""Share of the drift of rows that matrices make good: few rows say little of the drift of other rows."""


class _Sums(NamedTuple):
    """Over the rows x that a matrix multiplies in the rounded model.

    - `own`: of x x^T.
    - `drift`: of s (y - x) x^T. y is the row of the model that is not rounded, and s is `MADE_GOOD`, or less
      for rows that are longer than most.
    """

    own: Float32[Array, "inputs inputs"]
    drift: Float32[Array, "inputs inputs"]


class _Stream(NamedTuple):
    """A model whose rows have come to a layer.

    - `weights`: of the layer.
    - `hidden`: the rows of each pack before the layer.
    """

    weights: Params
    hidden: list[np.ndarray]


def round_layers(
    index: Index,
    config: ModelConfig,
    dtype: str,
    packs: Sequence[Pack],
    chunks: StagedChunks,
    progress: bool | Progress,
) -> None:
    """Round and write all matrices that a model keeps in few bits.

    Arguments:
    - `index`: the tensors of the model.
    - `config`: the model, with the form of these matrices.
    - `dtype`: of all other weights, and of the rows.
    - `packs`: what the model sees.
    - `chunks`: where numbers and scales are written. A layer that is complete there is not rounded again.
    - `progress`: see `reporter`; counts the bytes of these matrices.
    """
    assert config.quantization is not None
    form, config = config.quantization, dataclasses.replace(config, quantization=None)
    embed = load_tree({"embed": spec_tree(config)["embed"]}, index, dtype)["embed"]
    hidden = [np.asarray(leaf.rows(embed, pack.tokens)) for pack in packs]
    del embed
    exact, ours = _Stream({}, hidden), _Stream({}, list(hidden))
    layers = [_matrices(config, form, layer) for layer in range(config.num_layers)]
    total = sum(index[name].bytes for names in layers for name in names)
    with reporter(progress, total, "calibrating") as advance:
        for layer, names in enumerate(layers):
            weights = _layer_weights(index, config, dtype, layer)
            exact, ours = exact._replace(weights=weights), ours._replace(weights=dict(weights))
            for first, sharing in _SHARING.items():
                own = [name for name, leaf in names.items() if leaf in sharing]
                parts = [name + part.suffix for name in own for part in PARTS[form]]
                if not all(map(chunks.has, parts)):
                    _write_rounded(index, own, _input_sums(first, exact, ours, config, packs), form, chunks)
                rounded = matrices({part: chunks.stored(part) for part in parts}, header_name(dtype))
                ours.weights.update(_layer_weights(index | rounded, config, dtype, layer, sharing))
            for weights, hidden in (exact, ours):
                for i, pack in enumerate(packs):
                    hidden[i] = np.asarray(_after(weights, config, hidden[i], pack))
            advance(sum(index[name].bytes for name in names))


def _matrices(config: ModelConfig, form: WeightForm, layer: int) -> dict[str, str]:
    """The tensors of a layer that are kept in few bits, each with its leaf of the spec tree, or the first."""
    return {
        name: paths[0][-1]
        for paths, spec in stored_specs(config.quantised(form)).items()
        if spec.quantised
        for name, (place, *_) in spec.sources()
        if spec.layers[place] == layer
    }


def _layer_weights(
    index: Index, config: ModelConfig, dtype: str, layer: int, names: Collection[str] | None = None
) -> Params:
    """The weights of one layer by name, or only those of some names, on the default device."""
    (specs,) = layer_specs(config, layer).values()
    assert isinstance(specs, dict)
    wanted: Tree[TensorSpec] = {name: spec for name, spec in specs.items() if names is None or name in names}
    return jax.tree.map(lambda leaf: leaf[0], load_tree(wanted, index, dtype))


def _input_sums(
    first: str, exact: _Stream, ours: _Stream, config: ModelConfig, packs: Sequence[Pack]
) -> _Sums:
    """Sums over the rows of all packs that a matrix multiplies.

    Arguments:
    - `first`: the matrix.
    - `exact`: the model that is not rounded.
    - `ours`: the rounded model. Matrices of the layer that rows pass before `first` are rounded.
    """
    sums = _Sums(*(jnp.zeros([exact.weights[first].shape[1]] * 2) for _ in _Sums._fields))
    for pack, *rows in zip(packs, exact.hidden, ours.hidden, strict=True):
        sums = _with_inputs(sums, first, (exact.weights, ours.weights), config, rows, pack)
    return sums


def _write_rounded(
    index: Index, names: Sequence[str], sums: _Sums, form: WeightForm, chunks: StagedChunks
) -> None:
    """Round matrices that multiply the same rows, and write numbers and scales.

    Arguments:
    - `names`: of their tensors.
    - `sums`: of these rows.
    """
    inputs = feedback(sums.own)
    for name in names:
        matrix = index[name]
        followed = following(matrix.read(matrix.whole), sums.drift, inputs)
        values, scales = compensated(followed, inputs, form)
        stored = KINDS[form].stored_values(values)
        for part, held in zip(PARTS[form], (stored, scales), strict=True):
            told = HeldTensor(matrix.file, part.dtype, held.shape, 0, np.asarray(held))
            chunks.write(name + part.suffix, told)


@functools.partial(jax.jit, static_argnames=("first", "config"), donate_argnames="sums")
def _with_inputs(
    sums: _Sums,
    first: str,
    weights: tuple[Params, Params],
    config: ModelConfig,
    hidden: Sequence[Hidden],
    pack: Pack,
) -> _Sums:
    """`_input_sums` with one more pack.

    Arguments:
    - `weights`, `hidden`: of the model that is not rounded, and of the rounded one.
    """
    sees, there = _sees(config, pack), pack.rows.k_start < pack.rows.k_end
    exact, x = (
        jnp.where(there[:, None], Layer(one, config).matrix_inputs(h, sees)[first], 0)
        for one, h in zip(weights, hidden, strict=True)
    )
    drift = exact.astype(jnp.float32) - x.astype(jnp.float32)
    lengths = jnp.linalg.norm(x.astype(jnp.float32), axis=1)
    # Few rows may be a thousand times as long as the others: their drift would hide that of all others.
    usual = jnp.nanmedian(jnp.where(there, lengths, jnp.nan))
    shares = MADE_GOOD * jnp.square(jnp.minimum(1, usual / jnp.where(lengths > 0, lengths, 1)))

    def products(y: Float[Array, "rows inputs"]) -> Float32[Array, "inputs inputs"]:
        contracted = (((0,), (0,)), ((), ()))
        return lax.dot_general(
            y, x, contracted, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )

    return _Sums(sums.own + products(x), sums.drift + products((shares[:, None] * drift).astype(x.dtype)))


@functools.partial(jax.jit, static_argnames="config")
def _after(weights: Params, config: ModelConfig, h: Hidden, pack: Pack) -> Hidden:
    """The rows of a pack after a layer."""
    return Layer(weights, config).apply(h, _sees(config, pack))[0]


def _sees(config: ModelConfig, pack: Pack) -> Ranges:
    """What the rows of a pack see of each other."""

    def both(q: Heads, k: Heads, v: Heads, *first: RowInts, scale: float) -> AttentionOutput:
        ranges = (first, (pack.first, pack.end))
        return merge([attention(q, k, v, *one, scale=scale) for one in ranges])

    rotation = rotation_at(config.rope, config.head_dim, pack.rows.positions)
    return Ranges(pack.rows, rotation, both if config.attention == "block_causal" else attention)
