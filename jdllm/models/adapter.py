"""An adapter of low rank on the output projections of attention, with which a model drafts."""

import math
from typing import NamedTuple

from jaxtyping import Array, Float

from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, layer_runs

DOWN, UP = "o_down", "o_up"
"""Names of the adapter's weights beside those of a layer."""


class DraftAdapter(NamedTuple):
    """What is added to the output projection of each layer: `up @ down`.

    - `down`: to the rank of the adapter.
    - `up`: from it, its scale included.
    """

    down: Float[Array, "layers rank inputs"]
    up: Float[Array, "layers outputs rank"]

    @property
    def bytes(self) -> int:
        """Bytes on the device; on several cards on each of them."""
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in self)


class Drafting(NamedTuple):
    """How a model that verifies its own drafts makes them.

    - `adapter`: of the checkpoint, `None` where it has none or nobody wants it.
    - `plain`: whether the model drafts with its own weights alone.
    """

    adapter: DraftAdapter | None = None
    plain: bool = False


NO_DRAFTING = Drafting()
"""Of a model whose adapter is missing: it does not draft."""


def with_adapter(params: Params, config: ModelConfig, adapter: DraftAdapter | None) -> Params:
    """The weights of a model with an adapter.

    Arguments:
    - `params`, `config`: the model, all layers of which are alike.
    - `adapter`: `None` for the model itself.
    """
    if adapter is None:
        return params
    ((name, _, _),) = layer_runs(config)
    return params | {name: params[name] | {DOWN: adapter.down, UP: adapter.up}}
