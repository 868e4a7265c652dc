"""The evaluations that prepare requests over long contexts, each packed and compiled when its turn comes."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdllm.compiling.executables import Executable
from jdllm.decoding.batch import Batch
from jdllm.decoding.encoded_trace import encoding
from jdllm.decoding.rules import head_level
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import fine_bucket, head_bucket, row_bucket
from jdllm.planning.ladder import TILE_ROWS, Entry, PatientSizes
from jdllm.prefilling.build import Evaluation, build
from jdllm.prefilling.draft import draft, draft_segment, timetable
from jdllm.prefilling.retain import Watched, retain, retention_segment
from jdllm.prefilling.segments import joined
from jdllm.serving.fitting import check_fits
from jdllm.serving.long.request import LongRequest
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import head_rows, segment_params
from jdllm.serving.part_packing import Filled, Read, packed_rows, storage_of, table_of
from jdllm.serving.rule_states import packed_states
from jdllm.serving.spec import mask_id_of

_build = encoding(build)
_SHARE = 8
"""Packed rows for each row that is scored, at least, in the sizes that batches of chunks share."""


class Model:
    """What stages run on: a model on its device, and the sizes of the stages."""

    def __init__(self, model: OnDevice):
        self.params, self.config, self.executables, self.account, self.pool = model
        most = row_bucket(model.account.rows)
        sizes = sorted({fine_bucket(rows) for rows in range(TILE_ROWS, most + 1, TILE_ROWS)})
        narrow = [Entry(rows, head_bucket(rows // _SHARE), 1, 1) for rows in sizes]
        # Behind chunks that are stored, or short, most rows are scored.
        wide = [Entry(rows, rows, 1, 1) for rows in sizes]
        self.score_sizes = PatientSizes(sorted({*narrow, *wide}))
        self.stored_sizes = PatientSizes(wide)
        self.build_sizes, self.retain_sizes = PatientSizes(narrow), PatientSizes(narrow)

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
        """Pack it; returns what puts it on the device's queue and returns an array, or a trace."""

    def evaluations(self, found: Any) -> int:
        """How many evaluations of the model gave that."""
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

    def evaluations(self, found: Any) -> int:
        return int(found[-1])


class Retain(Stage):
    """Measures what the tokens of selected chunks are worth.

    The array holds the values of `jdllm.prefilling.retain.retain`, with the chunks in the order of `chunks`.

    Arguments:
    - `chunks`: the chunks, by their number, at most `room`; `window`: the rows behind them.
    """

    name = "retain"

    def __init__(
        self, model: Model, request: LongRequest, chunks: Sequence[int], room: int, window: np.ndarray
    ):
        spec, self._model = request.long_spec, model
        self._prefilling, self._window, self._room = spec.prefilling, window, room
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
        at = np.arange(self._prefilling.chunk_length)
        first = (starts + len(self._prefix))[:, None]
        window = first + lengths[:, None] + np.arange(len(self._window))
        seen = first + np.minimum(at, lengths[:, None] - 1), lengths, window
        # One size serves fewer chunks: the last one stands in for those that are not there.
        which = np.minimum(np.arange(self._room), len(lengths) - 1)
        arguments = tokens, rows, Watched(*(x[which].astype(np.int32) for x in seen))
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
        opened = np.zeros(0, np.int32) if self.candidates is None else self.candidates
        states = packed_states([request], [opened], entry)
        batch = Batch(tokens, rows, packed, segment_params([request], entry, model.config), states)
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
            donate=("pool",),
            mask_id=model.mask_id,
            logits_chunks=model.logits_chunks(entry.head_rows),
            level=Level.TOP if usual else Level.FILTERED,
        )
        return functools.partial(model.pool.run, executable, model.params, *arguments, writes=True)

    def _sizes(self) -> tuple[Entry, Any]:
        """Compiled sizes, and the table of pages to read."""
        head = head_bucket(self.head_rows)
        if not self._evaluation.reads:
            entry = self._model.build_sizes.choose(self.rows, 0, 1)
            self._model.build_sizes.compiled.add(entry)
            return entry._replace(head_rows=head), None
        entry = Entry(row_bucket(self.rows), head, 1, 1)
        read = self._model.pool.table_of(
            [self._request.id], [self._request.live_rows(self._evaluation.reads)]
        )
        tiles = -(-self.rows // TILE_ROWS)
        one = Read(np.asarray(read.pages), np.asarray(read.valid))
        return entry, table_of([one] * tiles, entry.rows // TILE_ROWS)
