"""The windows of an iteration of adaptive parallel decoding, as both models see them."""

import dataclasses

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.serving.adaptive.packing import pack_adaptive, parts_of
from jdllm.serving.pool.page_book import PageBook
from tests.decoding.test_adaptive import CAUSAL, LLADA, MASK
from tests.engines import entry_of, generation_request, infill_request

SAMPLING = SamplingParams(gen_length=5, transfer="adaptive", max_lookahead=2)


def test_windows_are_packed_for_both_models():
    window = dataclasses.replace(CAUSAL, sliding_window=3)
    requests = [
        generation_request(0, np.arange(4), SAMPLING, LLADA),
        infill_request(1, np.array([1, MASK, 2, MASK, 3]), SAMPLING, LLADA),
    ]
    pool = PageBook.empty(8, PAGE_ROWS).allocate(1, 5).allocate(0, 9)
    rows = [range(3, 5), range(3)]
    batch, candidates = pack_adaptive(requests, rows, LLADA, window, pool, entry_of(requests))
    assert [c.tolist() for c in candidates] == [[4, 5], [1, 3]]
    assert batch.head.row[:4].tolist() == [4, 5, 10, 12]
    assert batch.head.segment[:5].tolist() == [0, 0, 1, 1, 8]
    # The row before the last draft is the last that the verifier evaluates.
    assert batch.verified_tokens[:5].tolist() == [3, MASK, 1, MASK, 2]
    assert batch.drafted_by[:6].tolist() == [-1, 0, -1, 2, -1, -1]
    assert batch.verified_from[:4].tolist() == [0, 1, 2, 4]
    positions, place, (keys, start, end) = batch.verified
    assert positions[:5].tolist() == [3, 4, 0, 1, 2]
    (first,), (second,) = pool.pages_of(0), pool.pages_of(1)
    assert place.page[:5].tolist() == [first] * 2 + [second] * 3
    assert place.row[:5].tolist() == [3, 4, 0, 1, 2]
    assert keys.pages[:2].tolist() == [first, second]
    assert keys.valid.tolist() == [5, 3] + [0] * (len(keys.valid) - 2)
    at = PAGE_ROWS
    assert end[:6].tolist() == [4, 5, at + 1, at + 2, at + 3, 0]
    assert start[:6].tolist() == [1, 2, at, at, at, 0]
    nowhere = np.asarray(place.page[5:])
    assert (nowhere >= pool.pages).all()
    assert len(np.unique(nowhere)) == len(nowhere)


def test_a_window_that_begins_its_sequence_is_predicted_by_its_first_row():
    requests = [infill_request(0, np.array([MASK, 5, MASK]), SAMPLING, LLADA)]
    pool = PageBook.empty(2, PAGE_ROWS).allocate(0, 3)
    batch = pack_adaptive(requests, [range(2)], LLADA, CAUSAL, pool, entry_of(requests)).batch
    assert batch.verified_tokens[:2].tolist() == [MASK, 5]
    assert batch.drafted_by[:3].tolist() == [0, -1, -1]
    assert batch.verified_from[:2].tolist() == [0, 1]


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_what_is_unread_is_cut_into_parts_in_order(most: int):
    requests = [generation_request(i, np.zeros(9, int), SAMPLING, LLADA) for i in range(4)]
    unread = [range(2, 9), range(4, 4), range(1), range(3, 8)]
    groups = list(parts_of(requests, unread, most))
    sizes = [sum(len(part.rows) for part in group) for group in groups]
    assert sizes == [most] * (13 // most) + [13 % most] * (13 % most > 0)
    found = [(part.request.id, row) for group in groups for part in group for row in part.rows]
    assert found == [(i, row) for i, rows in enumerate(unread) for row in rows]
    assert all(part.rows for group in groups for part in group)
