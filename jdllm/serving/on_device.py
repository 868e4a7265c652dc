"""A model on its device, as the runners of all rooms take it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from jdllm.compiling.executables import Executables
from jdllm.compiling.over_cards import part_of_card
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.account import Account
from jdllm.serving.pool.kv_pool import KvPool


class OnDevice(NamedTuple):
    """A model on its device.

    - `params`, `config`: the weights on the device, and their shape.
    - `executables`: where compiled steps are kept.
    - `account`: the memory of the device.
    - `pool`: the KV pool.
    """

    params: Params
    config: ModelConfig
    executables: Executables
    account: Account
    pool: KvPool

    def on_each_card(self, holds: Callable[[Params, ModelConfig, int], bool]) -> Callable[[int], bool]:
        """Whether something holds for the part of the model on each card, by a number of rows."""
        part, config = part_of_card(self.params), self.config.on_card()
        return functools.cache(lambda rows: holds(part, config, rows))
