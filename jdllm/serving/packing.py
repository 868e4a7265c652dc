"""Packs the requests of one dispatch into the arrays of a bucket."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch, HeadRows, SegmentParams
from jdllm.decoding.registry import numbered, options
from jdllm.decoding.rules import segment_columns, segment_row
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import key_ranges
from jdllm.pallas.masked_logits import ANY, RowControl
from jdllm.planning.buckets import row_bucket
from jdllm.planning.ladder import Entry
from jdllm.serving.matched import followed
from jdllm.serving.request import Request
from jdllm.serving.rule_states import packed_states
from jdllm.serving.spec import RequestSpec, generation_spec


class Packed(NamedTuple):
    """A packed batch and where its head rows come from.

    - `batch`: NumPy arrays of the sizes of an entry. Padding rows see no keys and are never head rows.
    - `candidates`: for each request the positions of its head rows, which follow one another in the batch.
    """

    batch: Batch
    candidates: list[np.ndarray]


def smallest_request(config: ModelConfig, **sampling: Any) -> Request:
    """A request of two tokens, for batches whose sizes alone matter."""
    return Request(generation_spec([0], SamplingParams(gen_length=1, **sampling), config))


def lay_out(
    sequences: Sequence[np.ndarray],
    config: ModelConfig,
    size: int | None = None,
    positions: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, Rows, np.ndarray]:
    """Put sequences one after another into `size` rows, each a segment that sees itself only.

    Arguments:
    - `size`: by default a bucket that holds them.
    - `positions`: rotary positions of the tokens of each sequence, by default from 0 on.

    Returns int32 tokens `[rows]`, their `Rows`, and the first row of each sequence. Padding sees no keys.
    """
    lengths = [len(s) for s in sequences]
    starts = np.cumsum([0, *lengths])
    size = size or row_bucket(int(starts[-1]))
    tokens, rotary, k_start, k_end = (np.zeros(size, np.int32) for _ in range(4))
    for ids, start, own in zip(sequences, starts, positions or map(np.arange, lengths), strict=False):
        rows = slice(start, start + len(ids))
        tokens[rows], rotary[rows] = ids, own
        k_start[rows], k_end[rows] = key_ranges(config, int(start), len(ids))
    return tokens, Rows(rotary, k_start, k_end), starts[:-1]


def demand(request: Request) -> tuple[int, int]:
    """Packed rows and head rows of a full step or a refresh of a request; guidance counts twice."""
    copies = 2 if request.guided else 1
    return len(request.evaluated) * copies, len(request.candidates()) * copies


class LaidOut(NamedTuple):
    """What a model evaluates of some requests, one after another, in the sizes of an entry.

    - `tokens`, `rows`: int32 ids `[rows]`, and what each row sees.
    - `head`: the rows that may commit.
    - `candidates`: for each request the positions of these, which follow one another.
    """

    tokens: np.ndarray
    rows: Rows
    head: HeadRows
    candidates: list[np.ndarray]


def pack(requests: Sequence[Request], config: ModelConfig, entry: Entry) -> Packed:
    """Lay the requests out one after another, each followed by its unguided copy where it has guidance."""
    tokens, rows, head, candidates = lay_out_whole(requests, config, entry)
    segments, states = segment_params(requests, entry, config), packed_states(requests, candidates, entry)
    return Packed(Batch(tokens, rows, head, segments, states), candidates)


def lay_out_whole(requests: Sequence[Request], config: ModelConfig, entry: Entry) -> LaidOut:
    """What `pack` lays out, without the parameters of the requests."""
    candidates, evaluated = [r.candidates() for r in requests], [r.evaluated for r in requests]
    copies = [(ids[at], at) for r, at in zip(requests, evaluated, strict=True) for ids in r.sequences()]
    sequences, positions = zip(*copies, strict=True)
    tokens, rows, starts = lay_out(sequences, config, entry.rows, positions)
    last = np.cumsum([2 if r.guided else 1 for r in requests]) - 1
    places = [np.searchsorted(at, masked) for at, masked in zip(evaluated, candidates, strict=True)]
    parts = [
        (starts[last[i] - r.guided] + places[i], starts[last[i]] + places[i], np.full_like(places[i], i))
        for i, r in enumerate(requests)
    ]
    row, unguided, segment = (np.concatenate(column) for column in zip(*parts, strict=True))
    return LaidOut(tokens, rows, head_rows(row, unguided, segment, entry), candidates)


def head_rows(row: np.ndarray, unguided: np.ndarray, segment: np.ndarray, entry: Entry) -> HeadRows:
    """The head rows of a batch, padded to the head rows of its entry."""
    columns = ((row, 0), (unguided, 0), (segment, entry.segments))
    return HeadRows(*(padded(x.astype(np.int32), entry.head_rows, fill) for x, fill in columns))


def segment_params(requests: Sequence[Request], entry: Entry, config: ModelConfig) -> SegmentParams:
    """One row per request with a table of the entry's steps, padded with inactive segments that ask for
    nothing."""
    size, steps = entry.segments, entry.steps
    quota, fraction = np.zeros((size, steps), np.int32), np.zeros((size, steps), np.float32)
    for index, request in enumerate(requests):
        left = request.table_left(steps)
        own = index, slice(len(left.quota))
        quota[own], fraction[own] = left.quota, left.fraction
    asked = [(request.segment, request.spec) for request in requests]
    if all(row is spec.segment for row, spec in asked):
        columns = _columns(tuple(spec for _, spec in asked), size, config, (tuple(options()), numbered()))
    else:
        columns = segment_columns(_with_padding([row for row, _ in asked], size, config))
    columns = {**columns, "control": _placed(columns["control"], requests)}
    step = padded(np.array([r.steps for r in requests], np.int32), size)
    steps_left = padded(np.array([r.steps_left for r in requests], np.int32), size)
    return SegmentParams(**columns, step=step, steps_left=steps_left, quota=quota, fraction=fraction)


def controlled(requests: Sequence[Request]) -> bool:
    """Whether any of them controls logits, for which there are other executables."""
    return any(request.sampling.controlled for request in requests)


def _placed(control: RowControl | None, requests: Sequence[Request]) -> RowControl | None:
    """The controls of requests as they stand: positions are counted in their sequences, words end behind
    their known tokens, and answers of a given form go on as they may."""
    if control is None:
        return None
    control = followed(control, requests)
    begins = [int(r.positions(np.array(r.returned.start))) if r.sampling.min_tokens else 0 for r in requests]
    until, words = np.asarray(control.until), control.words
    control = control._replace(until=until + padded(np.array(begins, np.int32), len(until)))
    if words is None:
        return control
    left = np.full((len(until), words.shape[2] - 1), ANY, np.int32)
    for row, request in zip(left, requests, strict=False):
        known = request.tokens[max(0, request.known - len(row)) : request.known]
        row[len(row) - len(known) :] = known
    return control._replace(left=left)


@functools.lru_cache(maxsize=8)
def _columns(
    specs: tuple[RequestSpec, ...], size: int, config: ModelConfig, registered: Hashable
) -> dict[str, Any]:
    """What does not change while requests run: parts that follow one another often serve the same ones.

    Arguments:
    - `registered`: options and rules, for which there are columns.
    """
    return segment_columns(_with_padding([spec.segment for spec in specs], size, config))


def _with_padding(
    rows: Sequence[Mapping[str, Any]], size: int, config: ModelConfig
) -> Sequence[Mapping[str, Any]]:
    return [*rows, *[_padding_row(config)] * (size - len(rows))]


@functools.cache
def _padding_row(config: ModelConfig) -> dict[str, Any]:
    return segment_row(SamplingParams(), config)
