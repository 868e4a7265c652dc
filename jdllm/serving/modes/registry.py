"""Which way of generating a model has."""

from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig
from jdllm.serving.mode import Mode
from jdllm.serving.modes.blocks import Blocks
from jdllm.serving.modes.causal import Causal
from jdllm.serving.modes.causal_context import CausalContext
from jdllm.serving.modes.denoising import Denoising

CAUSAL_CONTEXT = "block_causal with a causal context"
"""The kind of attention of a block model whose finished rows see as a causal model's (`causal_context`)."""

MODES: dict[str, Mode] = {
    "full": Denoising(),
    "causal": Causal(),
    "block_causal": Blocks(),
    CAUSAL_CONTEXT: CausalContext(),
}
"""The mode of each kind of attention, by `ModelConfig.attention`."""


def register(attention: str, mode: Mode) -> None:
    """Let models with a kind of attention generate in a mode.

    Raises `ConfigError` for a kind that has a mode already.
    """
    if attention in MODES:
        raise ConfigError(f"attention {attention!r} is registered already: name it otherwise")
    MODES[attention] = mode


def unregister(attention: str) -> None:
    """Take back a registration; no model with this attention may be in use."""
    del MODES[attention]


def mode_of(config: ModelConfig) -> Mode:
    """How a model generates. Raises `ConfigError`, listing the known kinds, for attention without a mode."""
    needs = CAUSAL_CONTEXT if config.causal_context else config.attention
    if needs not in MODES:
        raise ConfigError(
            f"jdllm cannot generate from {config.family} models yet: it has no way of generating for"
            f" attention {needs!r} (known: {', '.join(MODES)})"
        )
    return MODES[needs]
