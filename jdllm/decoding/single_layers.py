"""The weights of a model as those need them that run it a layer at a time."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, layer_runs


class SingleLayers:
    """Layers by their number, and what stands before and behind them.

    Arguments:
    - `params`, `config`: the model, its weights on the device or the last layers' in host memory.
    """

    def __init__(self, params: Params, config: ModelConfig):
        self._params = params
        self._places = [(name, i) for name, start, end in layer_runs(config) for i in range(start, end)]

    def __getitem__(self, number: int) -> tuple[Any, np.int32]:
        """The stack of like layers that a layer belongs to, and its place there."""
        name, place = self._places[number]
        return self._params[name], np.int32(place)

    @property
    def stacks(self) -> list[Any]:
        """All stacks, in the order of their layers."""
        return [self._params[name] for name in dict.fromkeys(name for name, _ in self._places)]

    @property
    def last_stack(self) -> Any:
        """The stack of the last layer."""
        return self[-1][0]

    @property
    def embedding(self) -> Mapping[str, Any]:
        """What the rows before the first layer are read from."""
        return {"embed": self._params["embed"]}

    @property
    def head(self) -> Params:
        """What chooses tokens from the rows behind the last layer."""
        return {name: x for name, x in self._params.items() if name in ("final_norm", "head", "embed")}
