"""Runs a packed batch within the memory budget: plan, compile, compare, run."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.decoding.batch import Batch
from jdllm.decoding.encoded_trace import EncodedTrace, encode, encoding
from jdllm.decoding.executables import Executable, Executables, temp_bytes
from jdllm.decoding.non_finite import origin
from jdllm.decoding.step import denoise
from jdllm.decoding.tiered import denoise_tiered
from jdllm.errors import NonFiniteError
from jdllm.models.config import ModelConfig
from jdllm.models.pool import PAGE_ROWS
from jdllm.models.tiers import HostTiers
from jdllm.models.weights import Params
from jdllm.pallas.device import target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import head_bucket, row_bucket
from jdllm.planning.chunks import ChunkConfig
from jdllm.planning.plan import Bucket, Budget, Workload, max_context, plan_bucket, refusal, rungs
from jdllm.serving.adaptive_runner import AdaptiveRunner, Compile
from jdllm.serving.cached_runner import CachedRunner, Limit
from jdllm.serving.kv_pool import pages_within
from jdllm.serving.request import Request
from jdllm.serving.verifier import Verifier

_ATTEMPTS = 4
_UNPLANNED_LOGITS = 512
_denoise = encoding(denoise)


class StepRunner:
    """Runs steps of one model on one device.

    Arguments:
    - `params`, `config`: the model, with its weights on the device.
    - `executables`: where compiled steps are kept.
    - `budget`: what a step may use; without one nothing is planned, and only the logits are cut.
    - `chunks`: fixed chunk counts instead of planned ones; they are held against the budget all the same.
    - `max_num_logits`: head rows whose logits may exist at a time; by default as many as fit the budget,
      and 512 without one.
    - `verifier`: for adaptive parallel decoding; its weights count against every step's budget.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        *,
        budget: Budget | None = None,
        chunks: ChunkConfig | None = None,
        max_num_logits: int | None = None,
        verifier: Verifier | None = None,
    ):
        if budget is not None and verifier is not None:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(verifier.params))
            budget = dataclasses.replace(budget, overhead=budget.overhead + size)
        self.verifier = verifier
        self._params = params
        self._config = config
        self._executables = executables
        self._budget = budget
        self._chunks = chunks
        self._max_num_logits = max_num_logits
        self._choices: dict[tuple[Bucket, Level, bool], tuple[ChunkConfig, HostTiers | None]] = {}

    def run(self, batch: Batch, max_steps: int, mask_id: int, level: Level) -> EncodedTrace:
        """Up to `max_steps` steps of `batch`, NumPy arrays; one at most where host memory is needed.

        Raises `MemoryBudgetError` where the step does not fit, before anything has run.
        """
        chunks, tiers = self._choice(batch, mask_id, level)
        if tiers is not None:
            trace = denoise_tiered(
                self._params,
                batch,
                config=self._config,
                mask_id=mask_id,
                tiers=tiers,
                logits_chunks=chunks.logits,
                level=level,
                executables=self._executables,
            )
            return encode(trace)
        static = self._static(batch, mask_id, level, chunks)
        return self._executables.call(_denoise, self._params, batch, np.int32(max_steps), **static)

    def non_finite(self, request: Request) -> NonFiniteError:
        """What to raise for a request whose values are infinite or not numbers: it says where they began."""
        evaluated = [request.tokens, *([request.unguided_tokens()] if request.guided else [])]
        models = [("", self._params, self._config)]
        if request.adaptive and self.verifier is not None:
            models.append(("the verifier's ", self.verifier.params, self.verifier.config))
        for whose, params, config in models:
            for tokens in evaluated:
                place = origin(params, config, np.minimum(tokens, config.vocab_size - 1), self._executables)
                if place is not None:
                    return NonFiniteError(f"request {request.index}: {whose}{place}")
        return NonFiniteError(
            f"request {request.index}: a step gave infinite values or none, and its sequence alone does not:"
            " they come from another request of the batch, or from keys and values of a cache"
        )

    @functools.cached_property
    def adaptive(self) -> AdaptiveRunner:
        """A runner of adaptive parallel decoding, for which there must be a verifier."""
        if self.verifier is None:
            raise ValueError("adaptive parallel decoding needs a verifier")
        return AdaptiveRunner(
            self._params, self._config, self._executables, self.verifier, self._adaptive_chunks
        )

    def cached(self, rows: int) -> CachedRunner:
        """A runner of cached steps, whose pool leaves room for a full step of `rows` packed rows."""
        pages = limit = None
        if self._budget is not None:
            workload, bucket = self._workload(Level.TOP), Bucket(rows, row_bucket(rows), head_bucket(rows))
            plan = plan_bucket(workload, bucket, self._budget)
            left = self._budget.device - plan.peak_bytes
            pages = max(pages_within(self._config, str(self._dtype), PAGE_ROWS, left), 1)
            longest = max_context(workload, self._budget, host_tiers=False)
            limit = Limit(self._budget.device, plan.fixed_bytes, longest)
        return CachedRunner(
            self._params,
            self._config,
            self._executables,
            max_pages=pages,
            max_num_logits=self._most_logits,
            limit=limit,
        )

    @property
    def _dtype(self) -> jnp.dtype:
        return self._params["final_norm"].dtype

    @property
    def _most_logits(self) -> int:
        """Head rows whose logits may exist at a time where no plan says so."""
        return self._max_num_logits or _UNPLANNED_LOGITS

    def _unplanned(self, head_rows: int) -> ChunkConfig:
        return self._chunks or ChunkConfig(logits=-(-head_rows // self._most_logits))

    def _static(self, batch: Batch, mask_id: int, level: Level, chunks: ChunkConfig) -> dict[str, Any]:
        static = {"config": self._config, "mask_id": mask_id, "chunks": chunks, "level": level}
        return static | {"guided": _guided(batch)}

    def _choice(self, batch: Batch, mask_id: int, level: Level) -> tuple[ChunkConfig, HostTiers | None]:
        rows, head_rows = batch.tokens.shape[0], batch.head.row.shape[0]
        if self._budget is None:
            return self._unplanned(head_rows), None
        bucket = Bucket(rows, rows, head_rows)
        case = bucket, level, _guided(batch)
        if case not in self._choices:
            self._choices[case] = self._choose(batch, mask_id, level, bucket, self._budget)
        return self._choices[case]

    def _workload(self, level: Level) -> Workload:
        dtype = str(self._dtype)
        hopper = target(self._executables.platform).hopper and dtype != "float32"
        return Workload(self._config, dtype, hopper, level=level, max_num_logits=self._max_num_logits)

    def _choose(
        self, batch: Batch, mask_id: int, level: Level, bucket: Bucket, budget: Budget
    ) -> tuple[ChunkConfig, HostTiers | None]:
        def compiled(chunks: ChunkConfig) -> Executable:
            static = self._static(batch, mask_id, level, chunks)
            return self._executables.compile(_denoise, self._params, batch, np.int32(1), **static)

        return self._fit(self._workload(level), bucket, budget, rungs(self._config), compiled)

    def _adaptive_chunks(self, bucket: Bucket, compiled: Compile) -> ChunkConfig:
        if self._budget is None:
            return self._unplanned(bucket.head_rows)
        # Logits of two models and their mixture: about what a filter keeps.
        workload = dataclasses.replace(self._workload(Level.FILTERED), max_num_logits=self._most_logits)
        return self._fit(workload, bucket, self._budget, (), compiled)[0]

    def _fit(
        self,
        workload: Workload,
        bucket: Bucket,
        budget: Budget,
        tiers: Sequence[HostTiers],
        compiled: Compile,
    ) -> tuple[ChunkConfig, HostTiers | None]:
        """Plan, and let the compiler confirm it; a misfit is planned again with as much less."""
        surplus = needed = 0
        for _ in range(_ATTEMPTS):
            left = dataclasses.replace(budget, device=budget.device - surplus)
            plan = plan_bucket(workload, bucket, left, tiers)
            chunks = self._chunks or plan.chunks
            if plan.tiers is not None and self._chunks is None:
                if not plan.fits:
                    break
                return chunks, plan.tiers
            needed = plan.fixed_bytes + temp_bytes(compiled(chunks))
            if needed <= budget.device:
                return chunks, None
            if self._chunks is not None or not plan.fits:
                break
            surplus += needed - budget.device
        raise refusal(workload, bucket, budget, tiers, surplus=surplus, compiled=needed)


def _guided(batch: Batch) -> bool:
    return bool((np.asarray(batch.segments.guidance) > 0).any())
