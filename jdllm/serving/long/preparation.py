"""What happens to a request over a long context before its answer is denoised, and between blocks of it."""

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from jdllm.decoding.encoded_trace import Steps, decode
from jdllm.errors import NonFiniteError
from jdllm.prefilling.build import advancing, building
from jdllm.prefilling.layout import KeptChunk, Layout
from jdllm.prefilling.retain import reduced_layers
from jdllm.prefilling.score import behind
from jdllm.prefilling.select import best_chunks, best_tokens
from jdllm.serving.launch import Launch
from jdllm.serving.long.request import LongRequest
from jdllm.serving.long.score_stage import Score
from jdllm.serving.long.stages import Build, Draft, Model, Retain, Stage
from jdllm.serving.on_device import OnDevice
from jdllm.serving.pool.stored_chunks import content_key
from jdllm.serving.request import Request, of_class

Stages = Generator[Stage, np.ndarray, None]


class Preparation:
    """Prepares requests, a stage at a time, in the order that each needs.

    Arguments:
    - `model`: the model on its device.

    - `model`: what the stages run on.

    Stages are pure; what follows from their results happens here, when they are collected.
    """

    def __init__(self, model: OnDevice):
        self.model = Model(model)
        self._most = model.account.prepare_rows
        self._stages: dict[int, Stages] = {}
        self._next: dict[int, Stage] = {}

    def next(self, request: Request) -> Stage | None:
        """The stage to evaluate before the steps of the current block may run; `None` without one."""
        return None if request.prepared else self._stage(*of_class(LongRequest, [request]))

    def _stage(self, request: LongRequest) -> Stage:
        if request.id not in self._stages:
            between = request.opened is not None
            self._stages[request.id] = self._between(request) if between else self._before(request)
            self._next[request.id] = next(self._stages[request.id])
        return self._next[request.id]

    def waits_for(self, request: int) -> str | None:
        """The name of the stage that a request waits for; `None` where it waits for none."""
        stage = self._next.get(request)
        return None if stage is None else stage.name

    @property
    def held(self) -> int:
        """For how many requests something is held."""
        return len(self._stages)

    def forget(self, request: int) -> None:
        """Leave a request where it is: it has ended, or begins again."""
        self._stages.pop(request, None)
        self._next.pop(request, None)

    def clear(self) -> None:
        """Nothing: stages are pure, and their results are stored in the pool."""

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack the next stage of one request; `max_steps` does not matter."""
        (request,) = of_class(LongRequest, requests)
        stage = self._stage(request)
        candidates = np.zeros(0, np.int32) if stage.candidates is None else stage.candidates
        return Launch(stage.launch(), [candidates], [None], lambda found: self._take(request, stage, found))

    def _take(self, request: LongRequest, stage: Stage, found: Any) -> Steps | int:
        """Go on with what a stage found; returns its step, or how many evaluations it did."""
        if self._next.get(request.id) is not stage:
            return stage.evaluations(found)  # the request was left meanwhile
        try:
            self._next[request.id] = self._stages[request.id].send(found)
        except StopIteration:
            self.forget(request.id)
        return stage.evaluations(found) if stage.candidates is None else decode(found)

    def _before(self, request: LongRequest) -> Stages:
        spec, seconds = request.long_spec, request.prefilled.seconds
        selected: Sequence[int] = range(len(spec.chunks))
        draft = np.zeros(0, np.int32)
        if spec.chunks:
            with _timed(seconds, "draft"):
                draft = yield from self._draft(request)
            with _timed(seconds, "score"):
                scores = yield from self._score(request, draft)
            keep_first = spec.prefilling.keep_first_chunk
            selected = best_chunks(scores, spec.prefilling.chunks_kept, keep_first=keep_first).tolist()
        with _timed(seconds, "retain"):
            kept = yield from self._retain(request, selected, draft)
        self._lay_out(request, kept)
        with _timed(seconds, "build"):
            assert request.layout is not None
            behind_chunks = _last(
                np.concatenate([spec.long.scoring_query, draft]), spec.prefilling.retention_window
            )
            for evaluation in building(request.layout, behind_chunks, request.mask_id, shifted=spec.shifted):
                yield Build(self.model, request, evaluation)
        request.open(0)

    def _between(self, request: LongRequest) -> Stages:
        assert request.layout is not None
        block = request.block_number
        before = request.blocks[block - 1]
        tokens = request.tokens[before.start : before.stop]
        with _timed(request.prefilled.seconds, "build"):
            for evaluation in advancing(
                request.layout, block, tokens, request.mask_id, shifted=request.long_spec.shifted
            ):
                yield Build(self.model, request, evaluation)
        request.open(block)

    def _draft(self, request: LongRequest) -> Generator[Stage, np.ndarray, np.ndarray]:
        if request.long_spec.prefilling.score == "query":
            return np.zeros(0, np.int32)
        found = yield Draft(self.model, request)
        draft = found[:-1]
        request.prefilled.draft = draft.tolist()
        return draft

    def _score(self, request: LongRequest, draft: np.ndarray) -> Generator[Stage, np.ndarray, np.ndarray]:
        spec, prefilling = request.long_spec, request.long_spec.prefilling
        after = behind(
            spec.long.scoring_query,
            draft,
            request.mask_id,
            window=prefilling.score_window,
            unfilled=prefilling.score_unfilled,
        )
        keys = self._keys(request)
        scores: list[float] = []
        while len(scores) < len(spec.chunks):
            left = range(len(scores), len(spec.chunks))
            stage = Score(self.model, request, after, left, self._most, keys)
            found = yield stage
            logprobs = found[: len(stage.taken) * stage.scored].reshape(len(stage.taken), stage.scored)
            if not np.isfinite(logprobs).all():
                raise NonFiniteError("scores of chunks are infinite or not numbers")
            scores += logprobs.mean(axis=1, dtype=np.float32).tolist()
            request.prefilled.cached_chunks += len(stage.taken) if stage.stored else 0
        request.prefilled.scores = scores
        return np.array(scores, np.float32)

    def _keys(self, request: LongRequest) -> list[bytes]:
        """What the keys of instruction and chunks may be stored under; none where a row of these sees what is
        behind them, and where not all of them fit."""
        spec, pool = request.long_spec, self.model.pool
        if spec.prefilling.score_mask not in ("causal", "full"):
            return []
        rows = [len(spec.long.instruction), *(len(chunk.tokens) for chunk in spec.chunks)]
        if not pool.has_room(rows):
            return []
        before = spec.prefilling.score_mask, spec.long.instruction
        return [content_key(*before), *(content_key(*before, chunk.tokens) for chunk in spec.chunks)]

    def _retain(
        self, request: LongRequest, selected: Sequence[int], draft: np.ndarray
    ) -> Generator[Stage, np.ndarray, list[KeptChunk]]:
        spec, prefilling = request.long_spec, request.long_spec.prefilling
        long = [i for i in selected if len(spec.chunks[i].tokens) > (prefilling.tokens_kept or np.inf)]
        query = spec.long.scoring_query
        if prefilling.retention_draft:
            query = np.concatenate([query, draft[draft != request.mask_id]])
        values: dict[int, np.ndarray] = {}
        room, window = self._room(request), _last(query, prefilling.retention_window)
        for at in range(0, len(long), room):
            chunks = long[at : at + room]
            found = yield Retain(self.model, request, chunks, room, window)
            reduced = reduced_layers(found, prefilling)
            values |= {chunk: reduced[..., i, :, :] for i, chunk in enumerate(chunks)}
        return [self._kept(request, i, values.get(i)) for i in selected]

    def _room(self, request: LongRequest) -> int:
        """How many chunks retention measures at a time: all that are kept, or what fits an evaluation."""
        prefilling = request.long_spec.prefilling
        each = len(request.long_spec.long.instruction) + prefilling.chunk_length + prefilling.retention_window
        return min(prefilling.chunks_kept + prefilling.keep_first_chunk, max(1, self._most // each))

    def _kept(self, request: LongRequest, chunk: int, values: np.ndarray | None) -> KeptChunk:
        """A chunk with its kept tokens, from its values `[..., groups, tokens]`."""
        prefilling, tokens = request.long_spec.prefilling, request.long_spec.chunks[chunk].tokens
        per_head = prefilling.tokens_kept is not None and prefilling.retention == "per_head"
        if values is None:
            kept = np.arange(len(tokens))
            if per_head:
                config = self.model.config
                kept = np.broadcast_to(kept, (config.num_layers, config.num_kv_heads, len(tokens)))
        else:
            assert prefilling.tokens_kept is not None
            kept = best_tokens(
                values[..., : len(tokens)] if per_head else values[0, : len(tokens)],
                prefilling.tokens_kept,
                lowest=prefilling.retention_keep == "low",
                keep_first=prefilling.keeps_first_token,
            )
        return KeptChunk(chunk, tokens, kept)

    def _lay_out(self, request: LongRequest, kept: list[KeptChunk]) -> None:
        spec, found = request.long_spec, request.prefilled
        block_length = spec.blocks[0].stop - spec.blocks[0].start
        request.layout = Layout(
            spec.prefilling,
            spec.long.instruction,
            tuple(kept),
            spec.long.query,
            len(spec.tokens) - len(spec.long.query),
            block_length,
        )
        found.selected = [chunk.index for chunk in kept]
        found.kept = [chunk.kept for chunk in kept]
        found.spans = [(spec.chunks[i].start, spec.chunks[i].stop) for i in found.selected]


def _last(tokens: np.ndarray, count: int) -> np.ndarray:
    return tokens[max(len(tokens) - count, 0) :].astype(np.int32)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds until the end of a stage, waiting for its turn included."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
