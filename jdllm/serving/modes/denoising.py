"""Generation by denoising: masks are filled block by block, whole sequences or cached parts of them."""

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.cache_policies import Phase
from jdllm.decoding.causal_sampling import check_denoising
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.planning.buckets import row_bucket
from jdllm.planning.ladder import denoising_tile_rows, make_ladder
from jdllm.planning.plan import LONGEST
from jdllm.serving.adaptive.cached_runner import CachedAdaptiveRunner
from jdllm.serving.adaptive.runner import AdaptiveRunner
from jdllm.serving.adaptive.verifier import check_verifiable
from jdllm.serving.adaptive.verifier_keys import VerifierKeys
from jdllm.serving.adaptive.verifying import Verifying
from jdllm.serving.ahead import told_by_table
from jdllm.serving.background import Background
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.denoise.cached_packing import reuse_demand
from jdllm.serving.denoise.cached_runner import CachedRunner
from jdllm.serving.denoise.frontier import FrontierRequest
from jdllm.serving.denoise.full_runner import FullRunner
from jdllm.serving.denoise.layered_runner import LayeredCacheRunner
from jdllm.serving.denoise.layers_runner import LayersRunner
from jdllm.serving.launch import Compiled, Launcher
from jdllm.serving.long.preparation import Preparation
from jdllm.serving.long.request import LongRequest, LongSpec
from jdllm.serving.mode import Classes, EngineParts, Extras, Holder
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import demand
from jdllm.serving.request import Request
from jdllm.serving.spec import FrontierSpec, RequestSpec, generation_spec, infill_spec


class Denoising:
    """Each step evaluates masked rows, and a rule commits some of their tokens."""

    requests: Classes = MappingProxyType(
        {RequestSpec: Request, FrontierSpec: FrontierRequest, LongSpec: LongRequest}
    )

    def check_sampling(self, sampling: SamplingParams) -> None:
        check_denoising(sampling)

    def spec(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Decode | None = None,
        bos_id: int | None = None,
    ) -> RequestSpec:
        return generation_spec(prompt, sampling, config, decode)

    def infilling(
        self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, config: ModelConfig
    ) -> RequestSpec:
        return infill_spec(tokens, sampling, config)

    def parts(self, model: OnDevice, background: Background, extras: Extras) -> EngineParts:
        account = model.account
        tile_rows = denoising_tile_rows(shifted=model.config.logits_shift)
        ladder = make_ladder(account.rows, tile_rows=tile_rows)
        preparation = Preparation(model)
        full = FullRunner(
            model,
            ladder,
            background,
            chunks=extras.chunks,
            max_num_logits=extras.max_num_logits,
        )
        cached = CachedRunner(model, ladder, background)
        layers = LayersRunner(model, ladder.refresh, extras.company_rows)
        layered = LayeredCacheRunner(model)
        launchers: dict[Kind, Launcher] = {
            Kind.FULL: full.launch,
            Kind.REFRESH: cached.refresh,
            Kind.REUSE: cached.reuse,
            Kind.STAGE: preparation.launch,
            Kind.LAYERS: layers.launch,
            Kind.LAYERED: layered.launch,
        }
        holders: list[Holder] = [preparation, layers, layered]
        compiled: list[Compiled] = [full, cached]
        if extras.verifier is not None:
            keys = VerifierKeys(extras.verifier, account.rows)
            verifying = Verifying(model, extras.verifier, keys)
            adaptive = AdaptiveRunner(model, ladder, full, verifying)
            cached_adaptive = CachedAdaptiveRunner(model, ladder, background, verifying)
            launchers |= {
                Kind.ADAPTIVE: adaptive.launch,
                Kind.ADAPTIVE_REFRESH: cached_adaptive.refresh,
                Kind.ADAPTIVE_REUSE: cached_adaptive.reuse,
            }
            holders.append(keys)
            compiled += [verifying, adaptive, cached_adaptive]

        def check(spec: RequestSpec) -> None:
            check_verifiable(spec, extras.verifier)
            _check_verified_rows(spec, account.rows)
            full.check(spec)

        return EngineParts(
            launchers=launchers,
            costs=DenoisingCosts(preparation, account.rows, tile_rows, layers, layered),
            check=check,
            compiled=compiled,
            holders=holders,
            longest_served=account.rows if account.budget is None else account.longest,
            head_rows=ladder.head_rows,
            tiles=ladder.tiles,
            reuse_rows=ladder.reuse[-1].rows,
            filled={Kind.REFRESH: ladder.refresh},
            longest=account.longest if extras.chunks is None else LONGEST,
            beside_pool=account.max_context,
            whole_rows=ladder.shared_rows(account.rows),
            compiled_shared=[layers],
            held=layers.holding,
            set_aside=layers.set_aside,
        )


def _check_verified_rows(spec: RequestSpec, most: int) -> None:
    """Raise `RequestError` for a cached adaptive request for whose keys the verifier's pool has no room."""
    if spec.adaptive and spec.cached and spec.rows > most:
        raise RequestError(
            f"transfer 'adaptive' with cache {spec.sampling.cache!r} has room for sequences of {most} tokens,"
            f" and this one has {spec.rows}: leave the cache out, or raise max_num_batched_tokens"
        )


class DenoisingCosts:
    """Counts what requests of a model that denoises take.

    Arguments:
    - `preparation`: prepares requests over long contexts.
    - `rows`: packed rows of a step of the ladder. Beyond, a request takes the rows that are compiled for it.
    - `tile_rows`: of the ladder.
    - `layers`: runs refreshes that are cut; `layered`: runs requests whose keys do not fit the pool.
    """

    def __init__(
        self,
        preparation: Preparation,
        rows: int,
        tile_rows: int,
        layers: LayersRunner,
        layered: LayeredCacheRunner,
    ):
        self._preparation = preparation
        self._rows = rows
        self._tile_rows = tile_rows
        self._layers, self._layered = layers, layered

    def life(self, spec: RequestSpec) -> Life:
        if self._layered.takes(spec):
            return self._layered.life(spec)
        pages = -(-spec.stored_rows // PAGE_ROWS) if spec.cached else 0
        rows = spec.rows if spec.rows <= self._rows else row_bucket(spec.rows)
        return Life(rows, pages, holds=spec.adaptive)

    def demand(self, request: Request) -> Demand:
        if (stage := self._preparation.next(request)) is not None:
            return Demand(Kind.STAGE, stage.rows, 0, 0)
        if self._layered.takes(request.spec):
            return self._layered.demand(request)
        if request.cached and request.phase is Phase.REUSE:
            needs = reuse_demand(request, PAGE_ROWS, self._tile_rows)
            if request.adaptive:
                return Demand(Kind.ADAPTIVE_REUSE, *needs, verified=len(request.tokens))
            return Demand(Kind.REUSE, *needs, request.reuse_steps, told_by_table(request))
        if request.cached:
            needs = demand(request)
            if request.adaptive:
                return Demand(Kind.ADAPTIVE_REFRESH, *needs, 0)
            return Demand(Kind.LAYERS if self._layers.takes(request, *needs) else Kind.REFRESH, *needs, 0)
        kind = Kind.ADAPTIVE if request.adaptive else Kind.FULL
        return Demand(kind, *demand(request), 0, request.steps_left)
