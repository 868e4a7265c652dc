"""The windows of an iteration of adaptive parallel decoding, as both models see them."""

import dataclasses

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from jdllm.serving.adaptive_packing import pack_adaptive
from tests.decoding.test_adaptive import CAUSAL, LLADA, MASK
from tests.engines import entry_of, generation_request, infill_request


def test_windows_are_packed_for_both_models():
    window = dataclasses.replace(CAUSAL, sliding_window=3)
    sampling = SamplingParams(gen_length=5, transfer="adaptive", max_lookahead=2)
    requests = [
        generation_request(0, np.arange(4), sampling, LLADA),
        infill_request(1, np.array([1, MASK, 2, MASK, 3]), sampling, LLADA),
    ]
    batch, candidates = pack_adaptive(requests, LLADA, window, entry_of(requests))
    assert [c.tolist() for c in candidates] == [[4, 5], [1, 3]]
    assert batch.head.row[:4].tolist() == [4, 5, 10, 12]
    assert batch.head.segment[:5].tolist() == [0, 0, 1, 1, 8]
    # The row before the last draft is the last that anybody reads.
    assert batch.causal.k_end[:14].tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 0, 10, 11, 12, 0, 0]
    assert batch.causal.k_start[:14].tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 0, 9, 9, 9, 0, 0]
