"""Generation by block models: block after block, of which each is denoised and then stored."""

import functools
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.compiling.over_cards import over_processes
from jdllm.decoding.block_sampling import check_blocks, check_drafting, ways_of
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import dtypes_of
from jdllm.planning.card import DEFAULT_TARGET, visible_card
from jdllm.planning.ladder import block_tile_rows, make_causal_ladder, make_ladder
from jdllm.planning.plan import LONGEST
from jdllm.planning.step_time import RATES, evaluation_seconds
from jdllm.serving.auto_spec import AutoSpec, auto_spec
from jdllm.serving.background import Background
from jdllm.serving.blocks.infill import block_infill_spec
from jdllm.serving.blocks.request import BlockRequest, BlockSpec, block_length_of, block_spec
from jdllm.serving.blocks.runner import BlockRunner
from jdllm.serving.demands import Kind
from jdllm.serving.mode import Classes, CostsOf, EngineParts, Extras
from jdllm.serving.on_device import OnDevice
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, checked_ids, mask_id_of, without_masks
from jdllm.serving.speculation.lossy_request import LossyRequest, LossySpec, lossy_spec
from jdllm.serving.speculation.lossy_runner import LossyRunner
from jdllm.serving.speculation.packing import copies_of
from jdllm.serving.speculation.prompts import PromptStore
from jdllm.serving.speculation.request import SpeculativeRequest, SpeculativeSpec, as_causal, speculative_spec
from jdllm.serving.speculation.runner import SpeculativeRunner
from jdllm.serving.ways import Ways

AUTO, SPECULATION = "auto", "self_speculation"

_ONE_BY_ONE = {"block_length": 1}


class Blocks:
    """Blocks of the prompt are stored; then a block is denoised against them. It is stored with the first
    step of the next one, or before that step where logits are shifted.

    Or tokens are those of blocks of one position, which are drafted in longer blocks and verified. Or a step
    verifies what it drafts, and commits what that accepts. A request may leave the choice between the first
    two ways to the engine.
    """

    requests: Classes = MappingProxyType(
        {
            BlockSpec: BlockRequest,
            SpeculativeSpec: SpeculativeRequest,
            LossySpec: LossyRequest,
            AutoSpec: Request,
        }
    )

    def check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.generation_mode == AUTO:
            for own in ways_of(sampling, _ONE_BY_ONE).values():
                self.check_sampling(own)
        elif sampling.generation_mode == SPECULATION:
            check_drafting(sampling.changed(generation_mode=None))
        else:
            check_blocks(sampling)

    def spec(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Decode | None = None,
        bos_id: int | None = None,
    ) -> RequestSpec:
        if sampling.generation_mode == AUTO:
            ways = ways_of(sampling, _ONE_BY_ONE).items()
            asked = {name: self.spec(prompt, own, config, decode) for name, own in ways}
            return auto_spec(asked, block_length_of(sampling.block_length, config), copies_of(config))
        if sampling.generation_mode != SPECULATION:
            spec_of = lossy_spec if sampling.lossy_speculation else block_spec
            return spec_of(prompt, sampling, config, decode)
        own, length = sampling.changed(generation_mode=None), config.block_length
        without_masks(checked_ids(prompt, config), own, mask_id_of(config))
        assert length is not None  # a block model has one
        content = np.array([1], np.int32).tobytes()
        return speculative_spec(prompt, own, as_causal(config), length, decode, None, content)

    def infilling(
        self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, config: ModelConfig
    ) -> RequestSpec:
        return block_infill_spec(tokens, sampling, config)

    def parts(self, model: OnDevice, background: Background, extras: Extras) -> EngineParts:
        account = model.account
        check_extras(extras)
        assert model.config.block_length is not None  # a block model has one
        ladder = make_ladder(account.rows, tile_rows=block_tile_rows(model.config.block_length))
        stores, causal = make_causal_ladder(account.rows), as_causal(model.config)
        runner = BlockRunner(model, ladder, stores, background, at_once=not model.config.logits_shift)
        prompts = PromptStore(model, causal, stores, background)
        drafts = SpeculativeRunner(model, None, causal, prompts, make_ladder(account.rows), background)
        lossy = LossyRunner(model, runner, ladder, background)
        others = {
            Kind.STORE: prompts.launch,
            Kind.SPECULATE: drafts.launch,
            Kind.VERIFY: lossy.launch,
        }
        return EngineParts(
            launchers={Kind.PREFILL: runner.store, Kind.REUSE: runner.denoise, **others},
            costs=CostsOf({BlockSpec: runner, SpeculativeSpec: drafts, LossySpec: lossy}),
            check=lambda spec: None,
            compiled=(runner, prompts, drafts, *(() if model.config.logits_shift else (lossy,))),
            holders=(),
            longest_served=model.pool.pages * PAGE_ROWS,
            head_rows=ladder.head_rows,
            tiles=ladder.tiles,
            reuse_rows=ladder.reuse[-1].rows,
            filled={Kind.PREFILL: stores.prefill},
            longest=LONGEST,
            beside_pool=0,
            whole_rows=account.rows,
            ways=ways_on(model, self.requests),
        )


def ways_on(model: OnDevice, classes: Classes) -> Ways:
    """What chooses how requests generate that leave this to the engine.

    Arguments:
    - `classes`: the class of a request's state, for each class of what may be asked for.
    """
    card = visible_card()
    rates = RATES[DEFAULT_TARGET if card is None else card.target]
    dtype = dtypes_of(model.params).weights.name
    estimate = functools.partial(evaluation_seconds, model.config, dtype, rates)
    return Ways(classes, estimate, in_step=over_processes(model.params))


def check_extras(extras: Extras) -> None:
    """Raise `ConfigError` for what a block model has no use for.

    Arguments:
    - `extras`: what its engine would have beside the model.
    """
    if extras.chunks is not None:
        raise ConfigError("chunks are for steps of whole sequences: leave them out for a block model")
    if extras.verifier is not None:
        raise ConfigError("a verifier is for models that see whole sequences, which block models do not")
