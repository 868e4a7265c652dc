"""The evaluations that prepare requests over long contexts, each packed and compiled when its turn comes."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch
from jdllm.decoding.encoded_trace import encoding
from jdllm.decoding.executables import Executable, Executables
from jdllm.decoding.rules import head_level
from jdllm.execution.paged.parts import Parts
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.execution.transformer import Wanted
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.account import Account
from jdllm.planning.buckets import fine_bucket, head_bucket, row_bucket
from jdllm.planning.ladder import TILE_ROWS, Entry, Sizes
from jdllm.prefilling.build import Evaluation, build
from jdllm.prefilling.draft import draft, draft_segment, timetable
from jdllm.prefilling.retain import Watched, retain, retention_segment
from jdllm.prefilling.score import Behind, Scoring, score, scoring_of
from jdllm.prefilling.segments import joined
from jdllm.serving.cached_runner import CachedRunner
from jdllm.serving.fitting import check_fits
from jdllm.serving.long_request import LongRequest
from jdllm.serving.packing import head_rows, segment_params
from jdllm.serving.part_packing import Filled, Read, in_tiles, packed_rows, storage_of, table_of
from jdllm.serving.spec import mask_id_of
from jdllm.serving.stored_chunks import StoredChunk

_build = encoding(build)
_SHARE = 8
"""Packed rows for each row that is scored, at least, in the sizes that batches of chunks share."""

_SCORE_POOL, _BUILD_POOL = (3,), (4,)
"""Where the pool is among their arguments."""


class Model:
    """What stages run on.

    Arguments: as of `jdllm.serving.cached_runner.CachedRunner`.
    - `pool`: where keys and values are stored.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        account: Account,
        pool: CachedRunner,
    ):
        self.params = params
        self.config = config
        self.executables = executables
        self.account = account
        self.pool = pool
        most = row_bucket(account.rows)
        sizes = sorted({fine_bucket(rows) for rows in range(TILE_ROWS, most + 1, TILE_ROWS)})
        entries = [Entry(rows, head_bucket(rows // _SHARE), 1, 1) for rows in sizes]
        self.score_sizes, self.build_sizes, self.retain_sizes = (Sizes(entries) for _ in range(3))
        # Behind chunks that are stored most rows are scored.
        self.stored_sizes = Sizes([Entry(rows, rows, 1, 1) for rows in sizes])

    @property
    def mask_id(self) -> int:
        return mask_id_of(self.config)

    def compile(
        self, what: str, rows: int, function: Callable[..., Any], *args: Any, **options: Any
    ) -> Executable:
        """An executable that fits; raises `MemoryBudgetError` otherwise."""
        executable = self.executables.compile(function, self.params, *args, config=self.config, **options)
        check_fits(self.account, f"{what} of {rows} rows", rows, executable)
        return executable

    def logits_chunks(self, rows: int) -> int:
        return -(-rows // self.account.max_num_logits)


class Stage(abc.ABC):
    """One evaluation of the model for one request.

    - `name`: of the stage that it belongs to.
    - `candidates`: positions of the request's head rows, where it is a denoising step too.
    """

    name: str
    candidates: np.ndarray | None = None

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Packed rows, as things stand."""

    @abc.abstractmethod
    def launch(self) -> Callable[[], Any]:
        """Pack it; returns what puts it on the device's queue and returns an array."""

    def evaluations(self, found: np.ndarray) -> int:
        """How many evaluations of the model gave that array."""
        return 1


class Draft(Stage):
    """Drafts an answer; the array is its slots, and then how many evaluations that took."""

    name = "draft"

    def __init__(self, model: Model, request: LongRequest):
        spec = request.long_spec
        self._model, self._prefilling = model, spec.prefilling
        self._threshold = spec.sampling.effective("threshold")
        slots = spec.prefilling.draft_length
        self._segment = draft_segment(spec.long.instruction, spec.long.scoring_query, slots, model.mask_id)

    @property
    def rows(self) -> int:
        return self._segment.size

    def launch(self) -> Callable[[], Any]:
        size, slots = row_bucket(self.rows), self._prefilling.draft_length
        tokens, rows = packed_rows(self._segment, size)
        at = np.arange(self.rows - slots, self.rows, dtype=np.int32)
        arguments = tokens, rows, at, timetable(self._prefilling, self._threshold)
        executable = self._model.compile("a draft", size, draft, *arguments, mask_id=self._model.mask_id)
        return lambda: executable(self._model.params, *arguments)

    def evaluations(self, found: np.ndarray) -> int:
        return int(found[-1])


class Score(Stage):
    """Scores the first of some chunks, as many as fit, and stores their keys where that may serve again.

    The array is the log-probabilities of what is scored behind each of them, `taken` chunks.

    Arguments:
    - `most`: packed rows.
    - `left`: the chunks, by their number.
    - `keys`: of the instruction and of all chunks, where they are stored or may be; else none.

    `scored` tokens are scored behind each chunk.
    """

    name = "score"

    def __init__(
        self,
        model: Model,
        request: LongRequest,
        after: Behind,
        left: Sequence[int],
        most: int,
        keys: Sequence[bytes],
    ):
        self._model, self._spec, self._after = model, request.long_spec, after
        self._left, self._most, self._keys = left, most, keys
        self.scored = int(after.scored.sum())
        self.taken: Sequence[int] = ()
        self.stored = False

    @property
    def rows(self) -> int:
        stored, taken = self._group()
        return sum(self._rows_of(chunk, stored) for chunk in taken)

    def launch(self) -> Callable[[], Any]:
        self.stored, self.taken = self._group()
        return self._launch_stored() if self.stored else self._launch_whole()

    def _group(self) -> tuple[bool, Sequence[int]]:
        """Whether the first chunk is stored, and how many like it are next, in groups of equal size."""
        stored = self._find(self._left[0]) is not None
        alike = next(
            (i for i, chunk in enumerate(self._left) if (self._find(chunk) is not None) is not stored),
            len(self._left),
        )
        each = max(self._rows_of(chunk, stored) for chunk in self._left[:alike])
        most = max(1, self._most // each)
        groups = -(-alike // most)
        return stored, self._left[: -(-alike // groups)]

    def _rows_of(self, chunk: int, stored: bool) -> int:
        behind = len(self._after.tokens) + (0 if self._spec.shifted else self.scored)
        if stored:
            return -(-(1 + behind) // TILE_ROWS) * TILE_ROWS
        return len(self._spec.long.instruction) + len(self._spec.chunks[chunk].tokens) + behind

    def _scoring(self, chunk: int) -> Scoring:
        spec = self._spec
        return scoring_of(
            spec.long.instruction,
            spec.chunks[chunk].tokens,
            self._after,
            spec.prefilling.score_mask,
            self._model.mask_id,
            shifted=spec.shifted,
        )

    def _launch_whole(self) -> Callable[[], Any]:
        scorings = [self._scoring(chunk) for chunk in self.taken]
        segment, starts = joined([scoring.segment for scoring in scorings])
        entry = self._entry(segment.size)
        filled = self._room(starts) if self._keys else []
        storage = storage_of(filled, entry.rows) if filled else None
        return self._launched(scorings, segment, starts, entry, None, storage)

    def _launch_stored(self) -> Callable[[], Any]:
        """What is behind the chunks alone; the last row of a chunk predicts what follows it."""
        prefix = len(self._spec.long.instruction)
        scorings, reads = [], []
        for chunk in self.taken:
            before = prefix + len(self._spec.chunks[chunk].tokens) - 1
            scorings.append(self._scoring(chunk).after(before))
            pages = self._read(chunk + 1, before - prefix), self._read(0, prefix)
            whole = Read(*(np.concatenate(column) for column in zip(*pages, strict=True)))
            reads += [whole] * (self._rows_of(chunk, True) // TILE_ROWS)
        segment, starts = joined(in_tiles([scoring.segment for scoring in scorings]))
        entry = self._entry(segment.size)
        table = table_of(reads, entry.rows // TILE_ROWS)
        return self._launched(scorings, segment, starts, entry, table, None)

    def _launched(
        self, scorings: Sequence[Scoring], segment: Any, starts: Any, entry: Entry, table: Any, storage: Any
    ) -> Callable[[], Any]:
        model, size = self._model, entry.head_rows
        tokens, rows = packed_rows(segment, entry.rows)
        sources = np.concatenate([s.sources + at for s, at in zip(scorings, starts, strict=True)])
        targets = padded(np.concatenate([s.targets for s in scorings]).astype(np.int32), size)
        own = None
        if not self._spec.shifted:
            own = np.zeros(entry.rows, bool)
            for scoring, at in zip(scorings, starts.tolist(), strict=True):
                own[at : at + len(scoring.own)] = scoring.own
        wanted = Wanted(padded(sources.astype(np.int32), size), np.arange(size) < len(sources))
        parts = Parts(tokens, rows, own, table, storage, wanted)
        pool = None if table is None and storage is None else model.pool.abstract
        executable = model.compile(
            "scores",
            entry.rows,
            score,
            parts,
            targets,
            pool,
            donate=() if storage is None else _SCORE_POOL,
            logits_chunks=model.logits_chunks(size),
        )
        self._sizes.compiled.add(entry)
        arguments = model.params, parts, targets
        if pool is None:
            return lambda: executable(*arguments, None)[0]
        return functools.partial(model.pool.run, executable, *arguments, writes=storage is not None)

    def _entry(self, rows: int) -> Entry:
        return self._sizes.choose(rows, len(self.taken) * self.scored, 1)

    @property
    def _sizes(self) -> Sizes:
        return self._model.stored_sizes if self.stored else self._model.score_sizes

    def _find(self, chunk: int) -> StoredChunk | None:
        """A chunk that is stored, behind an instruction that is.

        The instruction is always used last: without it no chunk behind it serves again.
        """
        find = self._model.pool.chunks.find
        found = find(self._keys[chunk + 1]) if self._keys else None
        return found if found and find(self._keys[0]) else None

    def _read(self, number: int, rows: int) -> Read:
        stored = self._model.pool.chunks.find(self._keys[number])
        assert stored is not None
        table = self._model.pool.table_of(stored.owner, rows)
        return Read(np.asarray(table.pages), np.asarray(table.valid))

    def _room(self, starts: np.ndarray) -> list[Filled]:
        """Pages for what is not stored yet: the chunks, and the instruction that stands before all of them;
        none where there is no room."""
        prefix, pool = len(self._spec.long.instruction), self._model.pool
        rows = {
            self._keys[chunk + 1]: (prefix + start, prefix, len(self._spec.chunks[chunk].tokens))
            for chunk, start in zip(self.taken, starts.tolist(), strict=True)
        }
        rows[self._keys[0]] = (int(starts[0]), 0, prefix)
        rows = {key: of for key, of in rows.items() if pool.chunks.find(key) is None}
        pages = pool.store_chunks({key: count for key, (_, _, count) in rows.items()})
        pool.chunks.find(self._keys[0])
        filled = []
        for key, held in pages.items():
            row, position, count = rows[key]
            at = np.arange(count)
            filled.append(Filled(held, (row + at)[None, None], position + at))
        return filled


class Retain(Stage):
    """Measures what the tokens of selected chunks are worth.

    The array is that of `jdllm.prefilling.retain.retain`, one chunk for each of `chunks`.

    Arguments:
    - `chunks`: the chunks, by their number; `window`: what stands behind them.
    """

    name = "retain"

    def __init__(self, model: Model, request: LongRequest, chunks: Sequence[int], window: np.ndarray):
        spec, self._model = request.long_spec, model
        self._prefilling, self._window = spec.prefilling, window
        self._prefix = spec.long.instruction if spec.prefilling.retention_instruction else window[:0]
        self._chunks = [spec.chunks[chunk].tokens for chunk in chunks]

    @property
    def rows(self) -> int:
        return sum(len(self._prefix) + len(chunk) + len(self._window) for chunk in self._chunks)

    def launch(self) -> Callable[[], Any]:
        mask = self._prefilling.retention_mask
        segments = [retention_segment(self._prefix, chunk, self._window, mask) for chunk in self._chunks]
        segment, starts = joined(segments)
        entry = self._model.retain_sizes.choose(segment.size, 0, 1)
        tokens, rows = packed_rows(segment, entry.rows)
        lengths = np.array([len(chunk) for chunk in self._chunks], np.int32)
        at = np.arange(min(self._prefilling.chunk_length, row_bucket(int(lengths.max()))))
        first = (starts + len(self._prefix))[:, None]
        window = first + lengths[:, None] + np.arange(len(self._window))
        watched = Watched(
            (first + np.minimum(at, lengths[:, None] - 1)).astype(np.int32), lengths, window.astype(np.int32)
        )
        arguments = tokens, rows, watched
        executable = self._model.compile(
            "attention", entry.rows, retain, *arguments, prefilling=self._prefilling
        )
        self._model.retain_sizes.compiled.add(entry)
        return lambda: executable(self._model.params, *arguments)


class Build(Stage):
    """Stores keys and values of one evaluation; where that opens a block it is the block's first step, and
    the array its trace."""

    name = "build"

    def __init__(self, model: Model, request: LongRequest, evaluation: Evaluation):
        self._model, self._request, self._evaluation = model, request, evaluation
        self.candidates = request.candidates() if evaluation.opens is not None else None

    @property
    def rows(self) -> int:
        return self._evaluation.rows.size

    @property
    def head_rows(self) -> int:
        return len(self._evaluation.head)

    def launch(self) -> Callable[[], Any]:
        model, request, evaluation = self._model, self._request, self._evaluation
        entry, table = self._sizes()
        tokens, rows = packed_rows(evaluation.rows, entry.rows)
        head = np.array(evaluation.head, np.int32)
        packed = head_rows(head, head, np.zeros_like(head), entry)
        batch = Batch(tokens, rows, packed, segment_params([request], entry, model.config))
        pages = model.pool.pages_of(request.id)
        filled = []
        for part, source, positions in evaluation.stores:
            first, count = request.page_of_part(part), -(-source.shape[-1] // PAGE_ROWS)
            filled.append(Filled(pages[first : first + count], source, positions))
        arguments = batch, table, storage_of(filled, entry.rows)
        usual = head_level(request.sampling) is Level.TOP
        executable = model.compile(
            "an evaluation",
            entry.rows,
            _build,
            *arguments,
            model.pool.abstract,
            donate=_BUILD_POOL,
            mask_id=model.mask_id,
            logits_chunks=model.logits_chunks(entry.head_rows),
            level=Level.TOP if usual else Level.FILTERED,
        )
        return functools.partial(model.pool.run, executable, model.params, *arguments, writes=True)

    def _sizes(self) -> tuple[Entry, Any]:
        """Compiled sizes, and the table of what is read."""
        head = head_bucket(self.head_rows)
        if not self._evaluation.reads:
            entry = self._model.build_sizes.choose(self.rows, 0, 1)
            self._model.build_sizes.compiled.add(entry)
            return entry._replace(head_rows=head), None
        entry = Entry(row_bucket(self.rows), head, 1, 1)
        read = self._model.pool.table_of(self._request.id, self._request.live_rows(self._evaluation.reads))
        tiles = -(-self.rows // TILE_ROWS)
        one = Read(np.asarray(read.pages), np.asarray(read.valid))
        return entry, table_of([one] * tiles, entry.rows // TILE_ROWS)
