"""The stage that scores chunks, packed and compiled when its turn comes."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdllm.arrays import padded
from jdllm.execution.paged.parts import PackedParts
from jdllm.execution.transformer import Wanted
from jdllm.planning.ladder import TILE_ROWS, Entry, Sizes
from jdllm.prefilling.score import Behind, Scoring, score, scoring_of
from jdllm.prefilling.segments import joined
from jdllm.serving.long.request import LongRequest
from jdllm.serving.long.stages import Model, Stage
from jdllm.serving.part_packing import Filled, Read, in_tiles, packed_rows, storage_of, table_of


class Score(Stage):
    """Scores the first of some chunks, as many as fit, and stores their keys where that may serve again.

    The array is the log-probabilities of the scored tokens behind each of them, `taken` chunks.

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
        self._longest = max(self._rows_of(chunk, stored=False) for chunk in left)
        self.taken: Sequence[int] = ()
        self.stored = False
        self._rows, self._changes = 0, -1

    @property
    def rows(self) -> int:
        """Asked at every step of other requests: counted again only where other chunks are stored."""
        if self._changes != self._model.pool.chunks.changes:
            stored, taken = self._group()
            self._rows = sum(self._rows_of(chunk, stored) for chunk in taken)
            self._changes = self._model.pool.chunks.changes
        return self._rows

    def launch(self) -> Callable[[], Any]:
        self.stored, self.taken = self._group()
        return self._launch_stored() if self.stored else self._launch_whole()

    def _group(self) -> tuple[bool, Sequence[int]]:
        """Whether the first chunk is stored, and how many like it are next, in groups of equal size.

        A group of stored ones is no larger than one of others: few sizes serve both.
        """
        stored = self._is_stored(self._left[0])
        different = (i for i, chunk in enumerate(self._left) if self._is_stored(chunk) is not stored)
        alike = next(different, len(self._left))
        most = max(1, self._most // self._longest)
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
        """The rows behind the chunks alone; the last row of a chunk predicts the row behind it."""
        prefix = len(self._spec.long.instruction)
        lengths = [len(self._spec.chunks[chunk].tokens) for chunk in self.taken]
        scorings = [
            self._scoring(chunk).after(prefix + length - 1)
            for chunk, length in zip(self.taken, lengths, strict=True)
        ]
        own = self._read([chunk + 1 for chunk in self.taken], [length - 1 for length in lengths])
        # The instruction is used last: without it no chunk behind it serves again.
        [instruction] = self._read([0], [prefix])
        reads: list[Read] = []
        for chunk, pages in zip(self.taken, own, strict=True):
            whole = Read(*(np.concatenate(column) for column in zip(pages, instruction, strict=True)))
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
        parts = PackedParts(tokens, rows, own, table, storage, wanted)
        pool = None if table is None and storage is None else model.pool.abstract
        executable = model.compile(
            "scores",
            entry.rows,
            score,
            parts,
            targets,
            pool,
            donate=() if storage is None else ("pool",),
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

    def _is_stored(self, chunk: int) -> bool:
        """Whether a chunk is stored, behind an instruction that is."""
        chunks, keys = self._model.pool.chunks, self._keys
        return bool(keys) and keys[0] in chunks and keys[chunk + 1] in chunks

    def _read(self, numbers: Sequence[int], rows: Sequence[int]) -> list[Read]:
        """So many rows of the stored content of each key."""
        stored = [self._model.pool.chunks.find(self._keys[number]) for number in numbers]
        table = self._model.pool.table_of([chunk.owner for chunk in stored if chunk is not None], rows)
        pages, valid = np.asarray(table.pages), np.asarray(table.valid)
        return [Read(pages[a:b], valid[a:b]) for a, b in itertools.pairwise(table.first)]

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
