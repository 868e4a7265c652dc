"""Generation by block models whose finished rows are causal: each request chooses its way."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.block_sampling import check_drafting, ways_of
from jdllm.decoding.causal_sampling import check_causal
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.adapter import Drafting
from jdllm.models.config import ModelConfig
from jdllm.planning.ladder import make_causal_ladder, make_ladder
from jdllm.serving.auto_spec import AutoSpec, auto_spec
from jdllm.serving.background import Background
from jdllm.serving.blocks.context_request import (
    ContextRequest,
    ContextSpec,
    check_at_once,
    check_context,
    context_spec,
)
from jdllm.serving.blocks.runner import BlockRunner
from jdllm.serving.causal.request import CausalRequest, CausalSpec, causal_spec
from jdllm.serving.demands import Kind
from jdllm.serving.mode import Classes, CostsOf, EngineParts, Extras
from jdllm.serving.modes.blocks import AUTO, check_extras, ways_on
from jdllm.serving.modes.causal import Causal
from jdllm.serving.on_device import OnDevice
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, checked_ids, mask_id_of, without_masks
from jdllm.serving.speculation.packing import copies_of
from jdllm.serving.speculation.request import SpeculativeRequest, SpeculativeSpec, as_causal, speculative_spec
from jdllm.serving.speculation.runner import SpeculativeRunner

_CHECKS = {
    "autoregressive": check_causal,
    "diffusion": check_context,
    "bidirectional": check_context,
    "self_speculation": check_drafting,
}

_ONE_BY_ONE = {"generation_mode": "autoregressive", "block_length": None}


class CausalContext:
    """One token after another, one block after another, or the first by drafts: all in one engine, with the
    same stored rows."""

    requests: Classes = MappingProxyType(
        {
            CausalSpec: CausalRequest,
            ContextSpec: ContextRequest,
            SpeculativeSpec: SpeculativeRequest,
            AutoSpec: Request,
        }
    )

    def check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.generation_mode == AUTO:
            for own in ways_of(sampling, _ONE_BY_ONE).values():
                self.check_sampling(own)
            return
        _CHECKS[_mode_of(sampling)](_of_one_way(sampling))

    def spec(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Decode | None = None,
        bos_id: int | None = None,
    ) -> RequestSpec:
        assert config.block_length is not None  # a block model has one
        if sampling.generation_mode == AUTO:
            ways = ways_of(sampling, _ONE_BY_ONE).items()
            asked = {name: self.spec(prompt, own, config, decode, bos_id) for name, own in ways}
            return auto_spec(asked, sampling.block_length or config.block_length, copies_of(config))
        mode, own = _mode_of(sampling), _of_one_way(sampling)
        if mode in ("diffusion", "bidirectional"):
            return context_spec(prompt, own, config, decode, bidirectional=mode == "bidirectional")
        if mode == "autoregressive":
            return causal_spec(prompt, own, as_causal(config), decode, bos_id)
        without_masks(checked_ids(prompt, config), own, mask_id_of(config))
        return speculative_spec(prompt, own, as_causal(config), config.block_length, decode, bos_id)

    def infilling(
        self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, config: ModelConfig
    ) -> RequestSpec:
        raise RequestError(
            f"a {config.family} model counts blocks from the end of a prompt: it generates, and fills"
            " nothing in"
        )

    def parts(self, model: OnDevice, background: Background, extras: Extras) -> EngineParts:
        check_extras(extras)
        rows, own_config = model.account.rows, as_causal(model.config)
        causal = Causal().parts(model._replace(config=own_config), background, extras)
        ladder = make_ladder(rows)
        blocks = BlockRunner(model, ladder, make_causal_ladder(rows), background, Kind.STORE)
        drafts = SpeculativeRunner(
            model, extras.drafting.adapter, own_config, causal.costs, ladder, background
        )
        own = {Kind.STORE: blocks.store, Kind.REUSE: blocks.denoise, Kind.SPECULATE: drafts.launch}
        return dataclasses.replace(
            causal,
            launchers={**causal.launchers, **own},
            check=lambda spec: _check(spec, causal, extras.drafting, blocks.chunk),
            costs=CostsOf({CausalSpec: causal.costs, ContextSpec: blocks, SpeculativeSpec: drafts}),
            compiled=(*causal.compiled, blocks, drafts),
            head_rows=max(causal.head_rows, ladder.head_rows),
            tiles=ladder.tiles,
            reuse_rows=ladder.reuse[-1].rows,
            ways=ways_on(model, self.requests),
        )


def _check(spec: RequestSpec, causal: EngineParts, drafting: Drafting, chunk: int) -> None:
    """Raise `JdllmError` for a request that an engine cannot serve.

    Arguments:
    - `causal`: of those that generate one token after another.
    - `chunk`: rows that a part stores at most.
    """
    for way in spec.ways if isinstance(spec, AutoSpec) else ():
        _check(way.spec, causal, drafting, chunk)
    if isinstance(spec, ContextSpec):
        check_at_once(spec, chunk)
    if not isinstance(spec, (AutoSpec, SpeculativeSpec)):
        causal.check(spec)
    elif drafting.adapter is None and not drafting.plain:
        raise RequestError(
            "self-speculation drafts with an adapter, and the model was loaded without one (a checkpoint has"
            " it in linear_spec_lora): load the model with plain_drafts=True (--plain-drafts) to draft with"
            " its own weights"
        )


def _mode_of(sampling: SamplingParams) -> str:
    return sampling.generation_mode or "diffusion"


def _of_one_way(sampling: SamplingParams) -> SamplingParams:
    """The parameters as a model takes them that has this one way."""
    return sampling.changed(generation_mode=None)
