"""jdllm: diffusion language models in JAX, Flax and Pallas."""

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError, ConfigError, JdllmError, RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.module import Transformer
from jdllm.outputs import RequestOutput
from jdllm.planning.chunks import ChunkConfig
from jdllm.serving.engine import StepUpdate

__all__ = [
    "LLM",
    "CheckpointError",
    "ChunkConfig",
    "ConfigError",
    "JdllmError",
    "ModelConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StepUpdate",
    "Transformer",
]
