"""Generation by block models whose finished rows are causal: each request chooses its way."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.causal_sampling import check_causal
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError, RequestError
from jdllm.models.config import ModelConfig
from jdllm.serving.background import Background
from jdllm.serving.causal.request import CausalRequest, CausalSpec, causal_spec
from jdllm.serving.mode import Classes, EngineParts, Extras
from jdllm.serving.modes.causal import Causal
from jdllm.serving.on_device import OnDevice


class CausalContext:
    """One token after another, as a causal model generates."""

    requests: Classes = MappingProxyType({CausalSpec: CausalRequest})

    def check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.generation_mode is None:
            raise RequestError(
                "jdllm generates from this model in one of its ways yet: choose"
                " generation_mode='autoregressive'"
            )
        check_causal(_of_one_way(sampling))

    def spec(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Decode | None = None,
        bos_id: int | None = None,
    ) -> CausalSpec:
        self.check_sampling(sampling)
        return causal_spec(prompt, _of_one_way(sampling), _as_causal(config), decode, bos_id)

    def parts(self, model: OnDevice, background: Background, extras: Extras) -> EngineParts:
        if extras.verifier is not None:
            raise ConfigError("a verifier is for models that see whole sequences, which block models do not")
        return Causal().parts(model._replace(config=_as_causal(model.config)), background, extras)


def _as_causal(config: ModelConfig) -> ModelConfig:
    """The model as one that generates one token after another."""
    return dataclasses.replace(config, attention="causal", block_length=None, causal_context=False)


def _of_one_way(sampling: SamplingParams) -> SamplingParams:
    """The parameters as a model takes them that has this one way."""
    return sampling.changed(generation_mode=None)
