"""Where values that are infinite or not numbers begin: in which weights, or after which layer."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.execution.chunked import layer_by_layer
from jdllm.execution.transformer import embed, logits
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import dtypes_of
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params, layer_runs

_CHUNK = 1024
_HEAD_ROWS = 64
_LONGEST = 32768  # of the sequences that are run again, so that this fits wherever a step did


def origin(
    params: Params, config: ModelConfig, tokens: Int[np.ndarray, " rows"], executables: Executables
) -> str | None:
    """Look for the first place where a model has values that are infinite or not numbers.

    Arguments:
    - `params`, `config`: the model.
    - `tokens`: int32 ids of one sequence that led to such values.
    - `executables`: where compiled functions are kept.

    Returns words for a message, or `None` where nothing is found. Weights are looked at first, then the rows
    after each layer, then the head; sequences of more than 32768 tokens are not run again.
    """
    weights = jax.device_get(executables.call(_infinite_weights, params))
    named = _first_weights(weights, config)
    if named is not None:
        return f"the weights {named} have values that are infinite or not numbers: the checkpoint is damaged"
    if len(tokens) > _LONGEST:
        return None
    rows = Rows(np.arange(len(tokens), dtype=np.int32), *key_ranges(config, 0, len(tokens)))
    finite = jax.device_get(executables.call(_finite_layers, params, tokens, rows, config=config))
    if finite.all():
        return None
    place = int(np.argmin(finite))
    where = ["the embeddings", *(f"layer {i}" for i in range(config.num_layers)), "the head"][place]
    dtype = dtypes_of(params).activations.name
    advice = ": load it as bfloat16 or float32" if dtype == "float16" else ""
    return f"values exceed {dtype} in {where}, with weights that are all finite{advice}"


def _infinite_weights(params: Params) -> Params:
    """For each leaf, and of stacked ones for each layer, whether any value is not finite."""

    def look(path: tuple, leaf: Array) -> Bool[Array, "..."]:
        stacked = path[0].key in ("layers", "dense_layers")
        return ~jnp.isfinite(leaf).all(axis=tuple(range(int(stacked), leaf.ndim)))

    return jax.tree_util.tree_map_with_path(look, params)


def _first_weights(infinite: Params, config: ModelConfig) -> str | None:
    if infinite["embed"]:
        return "'embed'"
    number = 0
    for stack, start, end in layer_runs(config):
        for place in range(start, end):
            for name, flags in infinite[stack].items():
                if flags[place]:
                    return f"{name!r} of layer {number}"
            number += 1
    return next((repr(name) for name in ("final_norm", "head") if infinite.get(name)), None)


def _finite_layers(
    params: Params, tokens: Int[Array, " rows"], rows: Rows, *, config: ModelConfig
) -> Bool[Array, "layers+2"]:
    """Whether all values are finite after the embedding, after each layer and after the head."""
    count = -(-tokens.shape[0] // _CHUNK)
    chunks = ChunkConfig(ffn=count, query=count, kv=count)
    h = embed(params, tokens)
    after = [h, *layer_by_layer(params, config, h, rows, chunks)]
    of_head = lax.map(
        lambda row: jnp.isfinite(logits(params, config, row[None])).all(), after[-1], batch_size=_HEAD_ROWS
    )
    return jnp.stack([*(jnp.isfinite(x).all() for x in after), of_head.all()])
