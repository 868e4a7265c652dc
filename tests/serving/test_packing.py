"""Bucket sizes and the layout of packed batches."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.decoding.batch import PADDING_BANS
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.transfer.rule import Measure
from jdllm.models.config import ModelConfig
from jdllm.planning.buckets import MAX_STEPS_PER_DISPATCH, power_bucket, row_bucket
from jdllm.serving.packing import demand, lay_out
from jdllm.serving.request import Request
from tests.engines import generation_request, pack_all

MASK = 510
LADDER = sorted({row_bucket(rows) for rows in range(1, 70_000, 7)} | {row_bucket(1), row_bucket(32768)})


class TestBuckets:
    @given(st.integers(1, 200_000))
    def test_a_bucket_holds_its_rows_and_is_its_own_bucket(self, rows: int):
        size = row_bucket(rows)
        assert size >= rows
        assert row_bucket(size) == size
        assert size % 32 == 0

    @given(st.integers(1, 100_000), st.integers(1, 100_000))
    def test_more_rows_never_get_a_smaller_bucket(self, a: int, b: int):
        assert (row_bucket(a) <= row_bucket(b)) or a > b

    def test_sizes_grow_by_at_most_a_quarter(self):
        small = [size for size in LADDER if size <= 32768]
        assert small[0] == 128
        assert small[-1] == 32768
        assert all(b / a <= 1.25 for a, b in pairwise(small))

    @given(st.integers(32769, 262144))
    def test_large_buckets_are_the_next_multiple_of_4096(self, rows: int):
        assert row_bucket(rows) == -(-rows // 4096) * 4096

    @pytest.mark.parametrize("power", [1 << 18, 1 << 19, 1 << 20])
    @given(st.floats(0, 1, exclude_min=True))
    def test_beyond_32_strides_reach_the_next_power_of_two(self, power: int, share: float):
        rows = power + math.ceil(power * share)
        stride = power // 32
        assert row_bucket(rows) == -(-rows // stride) * stride

    @given(st.integers(0, 10_000), st.sampled_from([8, 32]))
    def test_power_buckets(self, count: int, smallest: int):
        size = power_bucket(count, smallest)
        assert size >= count
        assert size == smallest or size < 2 * count
        assert (size // smallest).bit_count() == 1
        assert size % smallest == 0


sequences = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(sequences)
def test_segments_see_themselves_only_and_padding_sees_nothing(config: ModelConfig, lengths: list[int]):
    ids = [np.arange(length) + 100 * i for i, length in enumerate(lengths)]
    tokens, rows, starts = lay_out(ids, config)
    assert len(tokens) == row_bucket(sum(lengths))
    assert starts.tolist() == np.cumsum([0, *lengths])[:-1].tolist()
    for start, segment in zip(starts, ids, strict=True):
        own = slice(start, start + len(segment))
        np.testing.assert_array_equal(tokens[own], segment)
        np.testing.assert_array_equal(rows.positions[own], np.arange(len(segment)))
        assert set(rows.k_start[own]) == {own.start}
        assert set(rows.k_end[own]) == {own.stop}
    padding = slice(sum(lengths), None)
    np.testing.assert_array_equal(rows.k_start[padding], rows.k_end[padding])


@st.composite
def request_lists(draw: st.DrawFn):
    """Requests that have already committed part of their current block."""
    out = []
    for _ in range(draw(st.integers(1, 12))):
        block, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        out.append(
            {
                "prompt": draw(st.lists(st.integers(0, 500), min_size=1, max_size=30)),
                "sampling": SamplingParams(
                    gen_length=block * blocks,
                    block_length=block,
                    cfg_scale=draw(st.sampled_from([0.0, 1.5])),
                    temperature=draw(st.sampled_from([0.0, 0.7])),
                    seed=draw(st.integers(0, 2**64 - 1)),
                    remasking=draw(st.sampled_from(["low_confidence", "random"])),
                ),
                "done": draw(st.integers(0, block * blocks - 1)),
            }
        )
    return out


def requests_of(drawn: list[dict], config: ModelConfig) -> list[Request]:
    requests = []
    for index, fields in enumerate(drawn):
        request = generation_request(index, np.array(fields["prompt"]), fields["sampling"], config)
        for _ in range(fields["done"]):
            request.advance(request.candidates()[-1:], np.array([7]), np.zeros(1))
        requests.append(request)
    return requests


class TestPack:
    @given(request_lists())
    def test_rows_are_the_requests_and_their_unguided_copies(self, config: ModelConfig, drawn: list[dict]):
        requests = requests_of(drawn, config)
        batch, _ = pack_all(requests, config)
        at = 0
        for request in requests:
            length = len(request.tokens)
            np.testing.assert_array_equal(batch.tokens[at : at + length], request.tokens)
            if request.guided:
                prompt = len(request.prompt)
                copy = batch.tokens[at + length : at + 2 * length]
                assert (copy[:prompt] == MASK).all()
                np.testing.assert_array_equal(copy[prompt:], request.tokens[prompt:])
            at += demand(request)[0]
        assert len(batch.tokens) == row_bucket(at)

    @given(request_lists())
    def test_head_rows_are_exactly_the_masked_rows_up_to_the_block_end(
        self, config: ModelConfig, drawn: list[dict]
    ):
        requests = requests_of(drawn, config)
        batch, candidates = pack_all(requests, config)
        head, size = batch.head, len(batch.segments.quota)
        expected = []
        at = 0
        for index, request in enumerate(requests):
            stop = request.block.stop
            masked = [p for p in range(stop) if request.tokens[p] == MASK]
            assert candidates[index].tolist() == masked
            copy = at + len(request.tokens) * request.guided
            expected += [(at + p, copy + p, index) for p in masked]
            at += demand(request)[0]
        count = len(expected)
        assert list(zip(*(x[:count].tolist() for x in head), strict=True)) == expected
        assert (head.segment[count:] == size).all()
        assert len(head.row) == power_bucket(sum(demand(r)[1] for r in requests), 32)

    @given(request_lists())
    def test_segment_parameters_and_their_padding(self, config: ModelConfig, drawn: list[dict]):
        requests = requests_of(drawn, config)
        segments = pack_all(requests, config).batch.segments
        for i, (request, fields) in enumerate(zip(requests, drawn, strict=True)):
            sampling = fields["sampling"]
            assert int(segments.seed[i, 0]) << 32 | int(segments.seed[i, 1]) == sampling.seed
            assert segments.step[i] == fields["done"]
            left = sampling.block_length - fields["done"] % sampling.block_length
            assert segments.steps_left[i] == request.steps_left == left
            assert segments.quota[i].tolist() == [1] * left + [0] * (MAX_STEPS_PER_DISPATCH - left)
            assert segments.guidance[i] == sampling.cfg_scale
            assert segments.temperature[i] == pytest.approx(sampling.temperature)
            assert (segments.measure[i] == Measure.RANDOM) == (sampling.remasking == "random")
        padding = slice(len(requests), None)
        assert len(segments.quota) == power_bucket(len(requests), 8)
        assert not segments.steps_left[padding].any()
        assert (segments.token_bans[padding] == PADDING_BANS).all()
        assert (segments.confidence_bans[padding] == PADDING_BANS).all()
