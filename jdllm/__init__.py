"""jdllm: diffusion language models in JAX, Flax and Pallas."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jdllm import losses
    from jdllm.chunks import ChunkConfig
    from jdllm.decoding.prefilling import Prefilling
    from jdllm.decoding.sampling import SamplingParams
    from jdllm.errors import (
        CheckpointError,
        ConfigError,
        JdllmError,
        KvPoolError,
        NonFiniteError,
        RequestError,
    )
    from jdllm.execution.module import Transformer
    from jdllm.llm import LLM
    from jdllm.models.config import ModelConfig
    from jdllm.models.hf_config import config_from_hf
    from jdllm.outputs import CompletionOutput, RequestOutput
    from jdllm.planning.budget import Budget, MemoryBudgetError
    from jdllm.planning.plan import MemoryPlan, Workload, max_context, plan_memory
    from jdllm.prompts import LongPrompt
    from jdllm.serving.async_engine import AsyncEngine
    from jdllm.serving.spec import generation_spec, infill_spec
    from jdllm.serving.updates import Ended, StepUpdate
    from jdllm.structured.structure import Structure

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "Budget",
    "CheckpointError",
    "ChunkConfig",
    "CompletionOutput",
    "ConfigError",
    "Ended",
    "JdllmError",
    "KvPoolError",
    "LongPrompt",
    "MemoryBudgetError",
    "MemoryPlan",
    "ModelConfig",
    "NonFiniteError",
    "Prefilling",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StepUpdate",
    "Structure",
    "Transformer",
    "Workload",
    "__version__",
    "config_from_hf",
    "generation_spec",
    "infill_spec",
    "losses",
    "max_context",
    "plan_memory",
]

_MODULES = {
    "LLM": "jdllm.llm",
    "Budget": "jdllm.planning.budget",
    "CheckpointError": "jdllm.errors",
    "ChunkConfig": "jdllm.chunks",
    "CompletionOutput": "jdllm.outputs",
    "ConfigError": "jdllm.errors",
    "JdllmError": "jdllm.errors",
    "KvPoolError": "jdllm.errors",
    "LongPrompt": "jdllm.prompts",
    "MemoryBudgetError": "jdllm.planning.budget",
    "MemoryPlan": "jdllm.planning.plan",
    "ModelConfig": "jdllm.models.config",
    "NonFiniteError": "jdllm.errors",
    "Prefilling": "jdllm.decoding.prefilling",
    "RequestError": "jdllm.errors",
    "RequestOutput": "jdllm.outputs",
    "SamplingParams": "jdllm.decoding.sampling",
    "AsyncEngine": "jdllm.serving.async_engine",
    "Ended": "jdllm.serving.updates",
    "StepUpdate": "jdllm.serving.updates",
    "Structure": "jdllm.structured.structure",
    "config_from_hf": "jdllm.models.hf_config",
    "generation_spec": "jdllm.serving.spec",
    "infill_spec": "jdllm.serving.spec",
    "Transformer": "jdllm.execution.module",
    "Workload": "jdllm.planning.plan",
    "max_context": "jdllm.planning.plan",
    "plan_memory": "jdllm.planning.plan",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that the command line starts without loading JAX."""
    if name == "losses":
        return importlib.import_module("jdllm.losses")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'jdllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
