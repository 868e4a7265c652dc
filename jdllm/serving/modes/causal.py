"""Causal generation: one token after another."""

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.causal_sampling import check_causal
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.planning.ladder import make_causal_ladder
from jdllm.planning.plan import LONGEST
from jdllm.serving.background import Background
from jdllm.serving.causal.layered_runner import LayeredRunner
from jdllm.serving.causal.request import CausalRequest, CausalSpec, causal_spec
from jdllm.serving.causal.runner import CausalRunner
from jdllm.serving.demands import Kind
from jdllm.serving.mode import Classes, EngineParts, Extras
from jdllm.serving.on_device import OnDevice
from jdllm.serving.spec import RequestSpec, infill_spec


class Causal:
    """Prompts are evaluated in parts and stored; then each step generates the next token."""

    requests: Classes = MappingProxyType({CausalSpec: CausalRequest})

    def check_sampling(self, sampling: SamplingParams) -> None:
        check_causal(sampling)

    def spec(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Decode | None = None,
        bos_id: int | None = None,
    ) -> CausalSpec:
        return causal_spec(prompt, sampling, config, decode, bos_id)

    def infilling(
        self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, config: ModelConfig
    ) -> RequestSpec:
        return infill_spec(tokens, sampling, config)  # which says that there are no masks

    def parts(self, model: OnDevice, background: Background, extras: Extras) -> EngineParts:
        account, pages = model.account, model.pool.pages
        if extras.chunks is not None:
            raise ConfigError("chunks are for models that denoise: leave them out for a causal model")
        ladder = make_causal_ladder(account.rows)
        layered = LayeredRunner(model)
        runner = CausalRunner(model, ladder, layered, background)
        most = ladder.decode[-1].segments
        return EngineParts(
            launchers={
                Kind.PREFILL: runner.prefill,
                Kind.DECODE: runner.decode,
                Kind.LAYERED: layered.launch,
            },
            costs=runner,
            check=layered.check,
            compiled=(runner,),
            holders=(layered,),
            longest_served=max(pages * PAGE_ROWS, layered.longest),
            head_rows=most,
            tiles=most,
            reuse_rows=0,
            filled={Kind.PREFILL: ladder.prefill},
            longest=LONGEST,
            beside_pool=0,
            whole_rows=account.rows,
        )
