"""One of several processes on one host that share a model; `test_several_hosts.py` starts them.

`python3 -m tests.several_hosts COORDINATOR PROCESSES PROCESS WHAT ARGUMENT...` joins the others. WHAT is
"generate", and what follows is for `tests.several_cards`, or "agree", and what follows are two forms of the
checkpoint "llada". Then it prints JSON: what the processes agree on, and what this one has read.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdllm.checkpoints.loading import load_params
from jdllm.decoding.sampling import SamplingParams
from jdllm.distributed import check_same, from_first, join_processes, leads, least
from jdllm.errors import ConfigError
from jdllm.models.hf_config import config_from_hf
from jdllm.models.spread import pool_sharding, weight_shardings
from jdllm.prompts import Prompt, same_on_all
from tests import several_cards
from tests.helpers import Golden


def read_bytes() -> int:
    """What this process has read so far, by any system call."""
    return int(Path("/proc/self/io").read_text().split()[1])


def refused(call: Callable[..., object], *args: Any) -> str | None:
    try:
        call(*args)
    except ConfigError as e:
        return str(e)
    return None


def agree(paths: list[Path]) -> None:
    process = jax.process_index()
    config = dataclasses.replace(config_from_hf(Golden("llada").directory), cards=2)
    told = {
        "leads": leads(),
        "least": least([process, 5 - process, -(1 << 40) - process]),
        "from_first": from_first([(1 << 52) + process, -process]),
        "same": refused(check_same, "texts", "a"),
        "different": refused(check_same, "texts", f"text {process}"),
        "seeds": [one.seed for one in same_on_all([Prompt("", [1, 2])] * 2, [SamplingParams(seed=None)] * 2)],
        "other_prompts": refused(same_on_all, [Prompt("", [1, process])], [SamplingParams()]),
        "other_parameters": refused(same_on_all, [Prompt("", [1])], [SamplingParams(seed=process)]),
        "odd": refused(pool_sharding, dataclasses.replace(config, cards=3)),
        "many": refused(pool_sharding, dataclasses.replace(config, cards=4)),
        "read": [],
        "shards": [],
    }
    for path in paths:
        before = read_bytes()
        params = load_params(path, config, "float32", sharding=weight_shardings(config))
        told["read"].append(read_bytes() - before)
        told["shards"].append(of_leaves(params, Golden("llada").tensors("model")))
    print(json.dumps(told))


def of_leaves(params: dict[str, Any], stored: dict[str, np.ndarray]) -> list[list[Any]]:
    """Of some leaves the size of the own shard, and whether it is as stored."""
    names = {"q": "q_proj", "o": "attn_out", "down": "ff_out", "ffn_norm": "ff_norm"}
    leaves = [(params["embed"], stored["model.transformer.wte.weight"])]
    for leaf, name in names.items():
        layers = range(len(params["layers"][leaf]))
        whole = np.stack([stored[f"model.transformer.blocks.{i}.{name}.weight"] for i in layers])
        leaves.append((params["layers"][leaf], whole))
    shards = [(leaf.addressable_shards[0], whole) for leaf, whole in leaves]
    return [
        [shard.data.size, bool((np.asarray(shard.data) == whole[shard.index]).all())]
        for shard, whole in shards
    ]


if __name__ == "__main__":
    coordinator, processes, process, what, *others = sys.argv[1:]
    join_processes(coordinator, int(processes), int(process), seconds=100)
    if what == "agree":
        agree([Path(path) for path in others])
    else:
        several_cards.main(others[0], others[1], [int(count) for count in others[2:]])
