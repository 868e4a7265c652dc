"""Generation by block models whose finished rows are causal: each request chooses its way."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.causal_sampling import check_causal
from jdllm.decoding.sampling import SamplingParams
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

_AUTOREGRESSIVE = "autoregressive"


class CausalContext:
    """One token after another, or one block after another; both in one engine, with the same stored rows."""

    requests: Classes = MappingProxyType({CausalSpec: CausalRequest, ContextSpec: ContextRequest})

    def check_sampling(self, sampling: SamplingParams) -> None:
        check = check_causal if sampling.generation_mode == _AUTOREGRESSIVE else check_context
        check(_of_one_way(sampling))

    def spec(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Decode | None = None,
        bos_id: int | None = None,
    ) -> RequestSpec:
        own = _of_one_way(sampling)
        if sampling.generation_mode == _AUTOREGRESSIVE:
            return causal_spec(prompt, own, _as_causal(config), decode, bos_id)
        return context_spec(prompt, own, config, decode)

    def parts(self, model: OnDevice, background: Background, extras: Extras) -> EngineParts:
        check_extras(extras)
        rows = model.account.rows
        causal = Causal().parts(model._replace(config=_as_causal(model.config)), background, extras)
        ladder = make_ladder(rows)
        blocks = BlockRunner(model, ladder, make_causal_ladder(rows), background, Kind.STORE)
        return dataclasses.replace(
            causal,
            launchers={**causal.launchers, Kind.STORE: blocks.store, Kind.REUSE: blocks.denoise},
            costs=_Costs(causal.costs, blocks),
            compiled=(*causal.compiled, blocks),
            head_rows=max(causal.head_rows, ladder.head_rows),
            tiles=ladder.tiles,
        )


class _Costs:
    """Counts what requests of both kinds take.

    Arguments:
    - `causal`: counts for those that generate one token after another.
    - `blocks`: counts for those that fill blocks.
    """

    def __init__(self, causal: Costs, blocks: Costs):
        self._causal = causal
        self._blocks = blocks

    def life(self, spec: RequestSpec) -> Life:
        return (self._blocks if isinstance(spec, ContextSpec) else self._causal).life(spec)

    def demand(self, request: Request) -> Demand:
        return (self._blocks if isinstance(request, ContextRequest) else self._causal).demand(request)


def _as_causal(config: ModelConfig) -> ModelConfig:
    """The model as one that generates one token after another."""
    return dataclasses.replace(config, attention="causal", block_length=None, causal_context=False)


def _of_one_way(sampling: SamplingParams) -> SamplingParams:
    """The parameters as a model takes them that has this one way."""
    return sampling.changed(generation_mode=None)
