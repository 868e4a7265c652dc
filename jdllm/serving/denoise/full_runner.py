"""Steps that evaluate whole sequences and store nothing, within the memory budget: plan, compile, compare."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executable, Program, temp_bytes
from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.encoded_trace import EncodedTrace, encode, encoding
from jdllm.decoding.rules import head_level
from jdllm.decoding.step import denoise
from jdllm.decoding.tiered import denoise_tiered
from jdllm.execution.offload.tiers import HostTiers
from jdllm.models.leaf import dtypes_of
from jdllm.pallas.masked_logits import Level
from jdllm.planning.asking import helps_full_step
from jdllm.planning.buckets import head_bucket, row_bucket
from jdllm.planning.budget import StepRoom
from jdllm.planning.ladder import Entry, Ladder, Sizes
from jdllm.planning.plan import Bucket, Workload, plan_bucket, refusal, rungs
from jdllm.serving.background import Background
from jdllm.serving.launch import Launch
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import controlled, demand, pack, smallest_request
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, mask_id_of

_ATTEMPTS = 4
_UNPLANNED_LOGITS = 512
_denoise = encoding(denoise)


class FullRunner:
    """Runs steps of one model on one device.

    Arguments:
    - `model`: the model on its device. Without a memory budget nothing is planned, and only the logits are
      cut. A step that needs the room of the KV pool frees the pool.
    - `ladder`: the sizes of its steps.
    - `background`: compiles sizes that fit better than those that serve now.
    - `chunks`: fixed chunk counts instead of planned ones; they are held against the budget all the same.
    - `max_num_logits`: head rows whose logits may exist at a time; by default as many as fit the budget,
      and 512 without one.

    `choices` are the chunks and tiers of each size so far, as they were planned, without and with requests
    that control logits.
    """

    def __init__(
        self,
        model: OnDevice,
        ladder: Ladder,
        background: Background,
        *,
        chunks: ChunkConfig | None = None,
        max_num_logits: int | None = None,
    ):
        self._params, self._config, self._executables, self._account, self._pool = model
        self._ladder = ladder
        self._background = background
        self._chunks = chunks
        self._max_num_logits = max_num_logits
        self._tiers = () if model.account.offloaded else tuple(rungs(model.config))
        self._sizes = {kind: Sizes(ladder.full) for kind in (False, True)}
        self.choices: dict[tuple[Entry, bool], tuple[ChunkConfig, HostTiers | None]] = {}

    def check(self, spec: RequestSpec) -> None:
        """Raise `MemoryBudgetError` for a request without a cache that is too long for the device."""
        if spec.cached or self._chunks is not None or spec.rows <= self._account.longest:
            return
        room = self._account.step_room(spec.rows)
        if room is not None:
            masked = int((spec.tokens == spec.mask_id).sum())
            bucket = Bucket(spec.rows, row_bucket(spec.rows), head_bucket(masked))
            helps = helps_full_step(self._account, spec.rows)
            raise refusal(self.workload(Level.TOP), bucket, room, self._tiers, helps=helps)

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack up to `max_steps` steps of whole sequences; with rows in host memory at most one runs."""
        rows, head_rows = np.sum([demand(r) for r in requests], axis=0).tolist()
        sizes = self._sizes[controlled(requests)]
        entry = sizes.choose(rows, head_rows, len(requests), max_steps)
        batch, candidates = pack(requests, self._config, entry)
        mask_id = mask_id_of(self._config)
        chunks, tiers = self._choice(batch, mask_id, entry)
        sizes.compiled.add(entry)
        missing = sizes.missing(rows, head_rows, len(requests))
        if missing is not None and self._background.idle:
            smaller = pack(requests, self._config, missing).batch
            make = functools.partial(self._compile_entry, smaller, missing)
            self._background.start(sizes, missing, _name(missing), make)

        def run() -> EncodedTrace:
            self.make_room(entry)
            if tiers is not None:
                return encode(self._tiered(batch, mask_id, chunks, tiers, max(map(_level, requests))))
            steps = np.int32(min(max_steps, entry.steps))
            static = self._static(mask_id, chunks)
            return self._executables.call(_denoise, self._params, batch, steps, **static)

        return Launch(run, candidates, [None] * len(requests), rows=entry.rows)

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled, as far as plans tell before; the parts of a step that the host
        drives are not among them."""
        for entry, batch in self._empty():
            chunks = self._planned(self.workload(Level.FILTERED), entry)
            args = self._params, batch, np.int32(1)
            static = self._static(mask_id_of(self._config), chunks)
            yield Program(_denoise, args, static, name=_name(entry))

    def warm(self) -> None:
        """Compile every entry of the ladder; entries with controls are compiled when first needed."""
        for entry, batch in self._empty():
            self._compile_entry(batch, entry)
            self._sizes[False].compiled.add(entry)

    def _compile_entry(self, batch: Batch, entry: Entry) -> None:
        mask_id = mask_id_of(self._config)
        chunks, tiers = self._choice(batch, mask_id, entry)
        if tiers is None:
            self._compiled(batch, mask_id, chunks)

    def _empty(self) -> Iterator[tuple[Entry, Batch]]:
        """A batch that asks for little, of the sizes of each entry."""
        request = smallest_request(self._config)
        for entry in self._ladder.full:
            yield entry, pack([request], self._config, entry).batch

    def make_room(self, entry: Entry) -> None:
        """Free the KV pool for a step that needs its room; none of the ladder does."""
        if entry not in self._ladder.full and entry.rows > self._account.max_context:
            self._pool.free()

    def _tiered(
        self, batch: Batch, mask_id: int, chunks: ChunkConfig, tiers: HostTiers, level: Level
    ) -> Trace:
        return denoise_tiered(
            self._params,
            batch,
            config=self._config,
            mask_id=mask_id,
            tiers=tiers,
            logits_chunks=chunks.logits,
            level=level,
            executables=self._executables,
        )

    def _static(self, mask_id: int, chunks: ChunkConfig) -> dict[str, Any]:
        return {"config": self._config, "mask_id": mask_id, "chunks": chunks, "level": Level.FILTERED}

    def _choice(self, batch: Batch, mask_id: int, entry: Entry) -> tuple[ChunkConfig, HostTiers | None]:
        key = entry, batch.segments.control is not None
        if key not in self.choices:
            self.choices[key] = self._choose(batch, mask_id, entry)
        return self.choices[key]

    def _choose(self, batch: Batch, mask_id: int, entry: Entry) -> tuple[ChunkConfig, HostTiers | None]:
        room = self._account.step_room(entry.rows)
        if room is None:
            return self._unplanned(entry.head_rows), None
        needs = functools.partial(self._temp_bytes, batch, mask_id)
        return self._fit(self.workload(Level.FILTERED), entry, room, self._tiers, needs)

    def _temp_bytes(self, batch: Batch, mask_id: int, chunks: ChunkConfig) -> int:
        """What the compiler allots to a step beside the layers that arrive from host memory."""
        return temp_bytes(self._compiled(batch, mask_id, chunks)) - self._account.arriving

    def _compiled(self, batch: Batch, mask_id: int, chunks: ChunkConfig) -> Executable:
        static = self._static(mask_id, chunks)
        return self._executables.compile(_denoise, self._params, batch, np.int32(1), **static)

    def adaptive_chunks(self, entry: Entry, needs: Callable[[ChunkConfig], int]) -> ChunkConfig:
        """Chunk counts for steps of adaptive parallel decoding, which need so many bytes beside what plans
        count as fixed; raises `MemoryBudgetError`."""
        room = self._account.step_room(entry.rows)
        if room is None:
            return self._unplanned(entry.head_rows)
        return self._fit(self._adaptive_workload, entry, room, (), needs)[0]

    def planned_adaptive_chunks(self, entry: Entry) -> ChunkConfig:
        """The same as far as plans tell before anything is compiled."""
        return self._planned(self._adaptive_workload, entry)

    @property
    def _adaptive_workload(self) -> Workload:
        """Logits of two models and their mixture take about what a filter keeps."""
        most = self._max_num_logits or _UNPLANNED_LOGITS
        return dataclasses.replace(self.workload(Level.FILTERED), max_num_logits=most)

    def _planned(self, workload: Workload, entry: Entry) -> ChunkConfig:
        """Chunk counts by a plan alone."""
        room = self._account.step_room(entry.rows)
        if room is None:
            return self._unplanned(entry.head_rows)
        return self._chunks or plan_bucket(workload, _bucket(entry), room).chunks

    def workload(self, level: Level) -> Workload:
        """What steps are planned for."""
        dtype = dtypes_of(self._params).activations.name
        device = self._executables.target
        return Workload(
            self._config.on_card(), dtype, device, level=level, max_num_logits=self._max_num_logits
        )

    def _unplanned(self, head_rows: int) -> ChunkConfig:
        most = self._max_num_logits or _UNPLANNED_LOGITS
        return self._chunks or ChunkConfig(logits=-(-head_rows // most))

    def _fit(
        self,
        workload: Workload,
        entry: Entry,
        room: StepRoom,
        tiers: Sequence[HostTiers],
        needs: Callable[[ChunkConfig], int],
    ) -> tuple[ChunkConfig, HostTiers | None]:
        """Plan, and let the compiler confirm it; a misfit is planned again with as much less."""
        bucket = _bucket(entry)
        surplus = needed = 0
        for _ in range(_ATTEMPTS):
            left = room._replace(device=room.device - surplus)
            plan = plan_bucket(workload, bucket, left, tiers)
            chunks = self._chunks or plan.chunks
            if plan.tiers is not None and self._chunks is None:
                if not plan.fits:
                    break
                return chunks, plan.tiers
            needed = plan.batch_bytes + needs(chunks)
            if needed <= room.device:
                return chunks, None
            if self._chunks is not None or not plan.fits:
                break
            surplus += needed - room.device
        raise refusal(workload, bucket, room, tiers, surplus=surplus, compiled=needed)


def _name(entry: Entry) -> str:
    return f"full step of {entry.rows} rows"


def _bucket(entry: Entry) -> Bucket:
    return Bucket(entry.rows, entry.rows, entry.head_rows)


def _level(request: Request) -> Level:
    return head_level(request.sampling)
