"""Replicas of which the first one's device stops answering: what `serve deploy` imports."""

import functools
import itertools
from pathlib import Path
from typing import Any

from jdllm.api.app import Access
from jdllm.api.replicas import Scale, application
from jdllm.api.service import Settings
from jdllm.demo import checkpoint_path
from jdllm.llm import LLM
from jdllm.serving.runner import Runner
from tests.clients.servers import MODEL, ROWS

PARTS = 2
"""That the device answers."""


def build(options: dict[str, Any]) -> Any:
    """A replica; `options["died"]` is a path that is free until the first one has started."""
    return application(functools.partial(load, Path(options["died"])), Scale(1, 1, 1), 1024)


def load(died: Path) -> tuple[LLM, Settings, Access]:
    if not died.exists():
        died.touch()
        _die_after(PARTS)
    llm = LLM(checkpoint_path(), dtype="float32", max_num_batched_tokens=ROWS, kv_pool="128MiB")
    return llm, Settings((MODEL,), llm.default_sampling()), Access()


def _die_after(answered: int) -> None:
    parts, collect = itertools.count(1), Runner.collect

    def collect_some(self: Runner, pending: Any) -> Any:
        if next(parts) > answered:
            raise RuntimeError("the device is lost")
        return collect(self, pending)

    def probe(self: Runner) -> None:
        raise RuntimeError("the device does not answer any more")

    Runner.collect, Runner.probe = collect_some, probe
