"""Rounding of a model's matrices, a layer at a time, by the rows that reach each layer.

The device holds one layer, the sums of its inputs and one pack of rows. The host holds the rows of all packs.
The rows of a layer are what the rounded layers before leave behind, so that a layer makes good what these
have done.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from jdllm.checkpoints.byte_progress import Progress, reporter
from jdllm.checkpoints.calibration.gptq import compensated, feedback
from jdllm.checkpoints.calibration.sequences import Pack
from jdllm.checkpoints.index import Index, header_name
from jdllm.checkpoints.loading import load_tree
from jdllm.checkpoints.rounded import SCALES, SCALES_SUFFIX, VALUES, HeldTensor, matrices
from jdllm.checkpoints.staged_chunks import StagedChunks
from jdllm.models import leaf
from jdllm.models.block import Hidden, RowInts
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, Layer, Ranges
from jdllm.models.rotary import rotation_at
from jdllm.models.weights import Params, layer_specs, spec_tree, stored_specs
from jdllm.pallas.attention import AttentionOutput, attention, merge
from jdllm.quantised import KINDS, WeightForm

_SHARING = {"q": ("q", "k", "v"), "o": ("o",), "gate": ("gate", "up"), "down": ("down",)}
"""Matrices that multiply the same rows, by the first of them."""

type _Sums = dict[str, Float32[Array, "inputs inputs"]]


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
    plain = dataclasses.replace(config, quantization=None)
    embed = load_tree({"embed": spec_tree(config)["embed"]}, index, dtype)["embed"]
    hidden = [np.asarray(leaf.rows(embed, pack.tokens)) for pack in packs]
    del embed
    layers = [_matrices(config, layer) for layer in range(config.num_layers)]
    total = sum(index[name].bytes for names in layers for name in names)
    with reporter(progress, total, "calibrating") as advance:
        for layer, names in enumerate(layers):
            parts = [part for name in names for part in (name, name + SCALES_SUFFIX)]
            if not all(map(chunks.has, parts)):
                sums = _input_sums(_layer_weights(index, plain, dtype, layer), plain, packs, hidden)
                _write_rounded(index, names, sums, config.quantization, chunks)
            rounded = matrices({part: chunks.stored(part) for part in parts}, header_name(dtype))
            weights = _layer_weights(index | rounded, config, dtype, layer)
            for i, pack in enumerate(packs):
                hidden[i] = np.asarray(_after(weights, config, hidden[i], pack))
            advance(sum(index[name].bytes for name in names))


def _matrices(config: ModelConfig, layer: int) -> dict[str, str]:
    """The tensors of a layer that are kept in few bits, each with its leaf of the spec tree, or the first."""
    return {
        name: paths[0][-1]
        for paths, spec in stored_specs(config).items()
        if spec.quantised
        for name, (place, *_) in spec.sources()
        if spec.layers[place] == layer
    }


def _layer_weights(index: Index, config: ModelConfig, dtype: str, layer: int) -> Params:
    """The weights of one layer by name, on the default device."""
    (stack,) = load_tree(layer_specs(config, layer), index, dtype).values()
    return jax.tree.map(lambda leaf: leaf[0], stack)


def _input_sums(
    weights: Params, config: ModelConfig, packs: Sequence[Pack], hidden: Sequence[np.ndarray]
) -> _Sums:
    """Sums of x x^T over the rows x of all packs, by the first of the matrices that multiply them.

    Arguments:
    - `weights`: of the layer.
    - `hidden`: the rows of each pack before the layer.
    """
    sums = {first: jnp.zeros([weights[first].shape[1]] * 2) for first in _SHARING}
    for pack, h in zip(packs, hidden, strict=True):
        sums = _with_inputs(sums, weights, config, h, pack)
    return sums


def _write_rounded(
    index: Index, names: dict[str, str], sums: _Sums, form: WeightForm, chunks: StagedChunks
) -> None:
    """Round the matrices of a layer and write numbers and scales.

    Arguments:
    - `names`: what `_matrices` returns.
    - `sums`: of the inputs of the layer.
    """
    for first, total in sums.items():
        inputs = feedback(total)
        for name in (name for name, own in names.items() if own in _SHARING[first]):
            matrix = index[name]
            values, scales = compensated(matrix.read(matrix.whole), inputs, form)
            stored = KINDS[form].stored_values(values)
            for part, dtype, held in ((name, VALUES[form], stored), (name + SCALES_SUFFIX, SCALES, scales)):
                chunks.write(part, HeldTensor(matrix.file, dtype, held.shape, 0, np.asarray(held)))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="sums")
def _with_inputs(sums: _Sums, weights: Params, config: ModelConfig, h: Hidden, pack: Pack) -> _Sums:
    """`_input_sums` with one more pack, whose rows before the layer are `h`."""
    inputs = Layer(weights, config).matrix_inputs(h, _sees(config, pack))
    there = pack.rows.k_start < pack.rows.k_end

    def products(x: Float[Array, "rows inputs"]) -> Float32[Array, "inputs inputs"]:
        rows = jnp.where(there[:, None], x, 0)
        contracted = (((0,), (0,)), ((), ()))
        return lax.dot_general(
            rows, rows, contracted, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )

    return {first: total + products(inputs[first]) for first, total in sums.items()}


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
