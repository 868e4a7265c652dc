"""A model on its device, as the runners of all rooms take it."""

from typing import NamedTuple

from jdllm.compiling.executables import Executables
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
