"""Packs the requests of an iteration of adaptive parallel decoding into the arrays of a bucket."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.adaptive import AdaptiveBatch, AdaptiveSegments
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import key_ranges
from jdllm.planning.ladder import Entry
from jdllm.serving.packing import head_rows, lay_out
from jdllm.serving.request import Request


class PackedAdaptive(NamedTuple):
    """A packed batch, and for each request the positions of its window, which follow one another in it."""

    batch: AdaptiveBatch
    candidates: list[np.ndarray]


def pack_adaptive(
    requests: Sequence[Request], config: ModelConfig, verifier_config: ModelConfig, entry: Entry
) -> PackedAdaptive:
    """Lay the requests out one after another, as both models see them."""
    candidates = [r.candidates() for r in requests]
    tokens, rows, starts = lay_out([r.tokens for r in requests], config, entry.rows)
    k_start, k_end = np.zeros_like(rows.k_start), np.zeros_like(rows.k_end)
    for start, window in zip(starts, candidates, strict=True):
        # The last draft is predicted by the row before it: no row from there on is needed.
        seen = slice(start, start + window[-1])
        k_start[seen], k_end[seen] = key_ranges(verifier_config, int(start), int(window[-1]))
    row = np.concatenate([start + window for start, window in zip(starts, candidates, strict=True)])
    segment = np.repeat(np.arange(len(requests)), [len(window) for window in candidates])
    batch = AdaptiveBatch(
        tokens,
        rows,
        Rows(rows.positions, k_start, k_end),
        head_rows(row, row, segment, entry),
        _segments(requests, entry.segments),
    )
    return PackedAdaptive(batch, candidates)


def _segments(requests: Sequence[Request], size: int) -> AdaptiveSegments:
    """One row per request, padded with segments that ask for nothing."""
    rows = [{**r.segment, "step": np.int32(r.steps)} for r in requests]
    columns = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
    return AdaptiveSegments(**{name: padded(x, size) for name, x in columns.items()})
