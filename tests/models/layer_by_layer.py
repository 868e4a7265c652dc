"""The layers of a model one after another, without a scan."""

from collections.abc import Iterator
from typing import Any

from jdllm.models.config import ModelConfig
from jdllm.models.moe import experts_of
from jdllm.models.weights import Params


def layers_in_order(params: Params, config: ModelConfig) -> Iterator[dict[str, Any]]:
    """The weights of each layer, found by counting: a layer's place is the number of its like before it."""
    dense = config.moe.dense_layers if config.moe else ()
    seen: dict[str, int] = {}
    for index in range(config.num_layers):
        name = "dense_layers" if index in dense else "layers"
        stack = dict(params[name])
        experts = experts_of(stack)
        place = seen.get(name, 0)
        seen[name] = place + 1
        layer: dict[str, Any] = {leaf: value[place] for leaf, value in stack.items()}
        yield layer | ({"experts": experts.of_layer(place)} if experts else {})
