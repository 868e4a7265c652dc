"""Generation by block models whose finished rows are causal: each request chooses its way."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.block_sampling import check_drafting
from jdllm.decoding.causal_sampling import check_causal
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.adapter import Drafting
from jdllm.models.config import ModelConfig
from jdllm.planning.ladder import make_causal_ladder, make_ladder
from jdllm.serving.background import Background
from jdllm.serving.blocks.context_request import ContextRequest, ContextSpec, check_context, context_spec
from jdllm.serving.blocks.runner import BlockRunner
from jdllm.serving.causal.request import CausalRequest, CausalSpec, causal_spec
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.mode import Classes, Costs, EngineParts, Extras
from jdllm.serving.modes.blocks import check_extras
from jdllm.serving.modes.causal import Causal
from jdllm.serving.on_device import OnDevice
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec
from jdllm.serving.speculation.request import SpeculativeRequest, SpeculativeSpec, speculative_spec
from jdllm.serving.speculation.runner import SpeculativeRunner

_CHECKS = {"autoregressive": check_causal, "diffusion": check_context, "self_speculation": check_drafting}


class CausalContext:
    """One token after another, one block after another, or the first by drafts: all in one engine, with the
    same stored rows."""

    requests: Classes = MappingProxyType(
        {CausalSpec: CausalRequest, ContextSpec: ContextRequest, SpeculativeSpec: SpeculativeRequest}
    )

    def check_sampling(self, sampling: SamplingParams) -> None:
        _CHECKS[_mode_of(sampling)](_of_one_way(sampling))

    def spec(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Decode | None = None,
        bos_id: int | None = None,
    ) -> RequestSpec:
        mode, own = _mode_of(sampling), _of_one_way(sampling)
        if mode == "diffusion":
            return context_spec(prompt, own, config, decode)
        if mode == "autoregressive":
            return causal_spec(prompt, own, _as_causal(config), decode, bos_id)
        assert config.block_length is not None  # a block model has one
        return speculative_spec(prompt, own, _as_causal(config), config.block_length, decode, bos_id)

    def parts(self, model: OnDevice, background: Background, extras: Extras) -> EngineParts:
        check_extras(extras)
        rows, as_causal = model.account.rows, _as_causal(model.config)
        causal = Causal().parts(model._replace(config=as_causal), background, extras)
        ladder = make_ladder(rows)
        blocks = BlockRunner(model, ladder, make_causal_ladder(rows), background, Kind.STORE)
        drafts = SpeculativeRunner(
            model, extras.drafting.adapter, as_causal, causal.costs, ladder, background
        )
        own = {Kind.STORE: blocks.store, Kind.REUSE: blocks.denoise, Kind.SPECULATE: drafts.launch}
        return dataclasses.replace(
            causal,
            launchers={**causal.launchers, **own},
            check=lambda spec: _check(spec, causal, extras.drafting),
            costs=_Costs(causal.costs, blocks, drafts),
            compiled=(*causal.compiled, blocks, drafts),
            head_rows=max(causal.head_rows, ladder.head_rows),
            tiles=ladder.tiles,
        )


class _Costs:
    """Counts what requests of all ways take.

    Arguments:
    - `causal`: counts for those that generate one token after another.
    - `blocks`: counts for those that fill blocks.
    - `drafts`: counts for those whose model verifies its drafts.
    """

    def __init__(self, causal: Costs, blocks: Costs, drafts: Costs):
        self._of = {CausalSpec: causal, ContextSpec: blocks, SpeculativeSpec: drafts}

    def life(self, spec: RequestSpec) -> Life:
        return self._of[type(spec)].life(spec)

    def demand(self, request: Request) -> Demand:
        return self._of[type(request.spec)].demand(request)


def _check(spec: RequestSpec, causal: EngineParts, drafting: Drafting) -> None:
    """Raise `JdllmError` for a request that an engine cannot serve.

    Arguments:
    - `causal`: of those that generate one token after another.
    """
    if not isinstance(spec, SpeculativeSpec):
        causal.check(spec)
    elif drafting.adapter is None and not drafting.plain:
        raise RequestError(
            "self-speculation drafts with an adapter, and the model was loaded without one (a checkpoint has"
            " it in linear_spec_lora, and several cards have none): load the model with plain_drafts=True"
            " (--plain-drafts) to draft with its own weights"
        )


def _as_causal(config: ModelConfig) -> ModelConfig:
    """The model as one that generates one token after another."""
    return dataclasses.replace(config, attention="causal", block_length=None, causal_context=False)


def _mode_of(sampling: SamplingParams) -> str:
    return sampling.generation_mode or "diffusion"


def _of_one_way(sampling: SamplingParams) -> SamplingParams:
    """The parameters as a model takes them that has this one way."""
    return sampling.changed(generation_mode=None)
