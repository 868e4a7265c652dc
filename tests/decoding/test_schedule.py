"""Tokens per step, against the recorded tables of the official codes."""

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.decoding.rules import step_table
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import block_steps, deferred_quota, dream_fractions, transfer_schedule
from jdllm.errors import RequestError
from tests.helpers import Golden

TABLE = Golden("llada").json("transfer_table")
TIMETABLE: Any = Golden("dream").json("schedule_table")


def test_equals_the_official_table():
    assert TABLE["single"]
    for case in TABLE["single"]:
        assert transfer_schedule(case["masked"], case["steps"]).tolist() == case["counts"], case
    batch = TABLE["batch"]
    for mask, counts in zip(batch["mask_index"], batch["counts"], strict=True):
        assert transfer_schedule(sum(mask), batch["steps"]).tolist() == counts


@given(st.integers(0, 5000), st.integers(1, 600))
def test_shape_of_every_schedule(masks: int, steps: int):
    counts = transfer_schedule(masks, steps)
    assert counts.shape == (steps,)
    assert counts.sum() == masks
    assert (np.diff(counts) <= 0).all()
    assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize(
    ("gen_length", "steps", "block_length", "expected"), [(32, 16, 8, 4), (32, 32, 32, 32), (7, 1, 7, 1)]
)
def test_steps_are_shared_by_the_blocks(gen_length: int, steps: int, block_length: int, expected: int):
    assert block_steps(gen_length, steps, block_length) == expected


def test_a_block_length_that_does_not_divide_is_refused_with_one_that_does():
    with pytest.raises(RequestError, match=r"gen_length 32 is not divisible by block_length 12.*such as 8$"):
        block_steps(32, 32, 12)


def test_a_block_length_beyond_the_generation_is_refused():
    with pytest.raises(RequestError, match=r"not divisible by block_length 64.*such as 32$"):
        block_steps(32, 32, 64)


@pytest.mark.parametrize(("steps", "near"), [(30, 32), (1, 4), (5, 4)])
def test_steps_that_do_not_divide_are_refused_with_some_that_do(steps: int, near: int):
    with pytest.raises(RequestError, match=f"steps {steps} .* number of blocks 4 .*such as {near}$"):
        block_steps(32, steps, 8)


class TestDreamTimetable:
    @pytest.mark.parametrize(
        "case", TIMETABLE, ids=lambda c: f"g{c['gen_length']}_s{c['steps']}_eps{c['eps']}"
    )
    def test_equals_the_recorded_table(self, case: dict):
        left, counts = case["gen_length"], []
        for fraction in dream_fractions(case["steps"], case["eps"]):
            counts.append(int(np.float32(left) * fraction))
            left -= counts[-1]
        assert counts == case["tokens_per_step"]

    @given(st.integers(1, 600), st.sampled_from([0.0, 1e-5, 1e-3, 0.05, 0.5, 0.999]))
    def test_equals_an_emulation_in_single_precision(self, steps: int, eps: float):
        times = [_time(index, steps, eps) for index in range(steps + 1)]
        expected = [np.float32(1) - s / t for t, s in pairwise(times)]
        actual = dream_fractions(steps, eps)
        assert actual.dtype == np.float32
        assert actual.tolist() == [*expected[:-1], 1]

    @given(st.integers(2, 600), st.integers(1, 1000).map(lambda n: n / 1001))
    def test_is_the_timetable_up_to_rounding(self, steps: int, eps: float):
        stride = (1 - Fraction(eps)) / steps
        exact = [float(stride / (1 - stride * i)) for i in range(steps - 1)]
        np.testing.assert_allclose(dream_fractions(steps, eps)[:-1], exact, rtol=1e-4, atol=1e-6)

    def test_one_step_commits_everything(self):
        assert dream_fractions(1, 1e-3).tolist() == [1]


def _time(index: int, steps: int, eps: float) -> np.float32:
    """Entry of a single-precision range from 1 to eps, whose halves count from their own ends."""
    stride = (np.float32(eps) - np.float32(1)) / np.float32(steps)
    if index < (steps + 1) // 2:
        return np.float32(1) + stride * np.float32(index)
    return np.float32(eps) - stride * np.float32(steps - index)


class TestDeferred:
    @given(st.integers(1, 12), st.integers(1, 6), st.data())
    def test_quotas_carry_over_what_was_put_off(self, steps: int, base: int, data: st.DataObject):
        masks = steps * base
        quotas = deferred_quota(masks, steps)
        left, put_off, step = masks, 0, 0
        while left:
            want = (base if step < steps else 0) + put_off
            assert quotas[step] + left == want
            took = data.draw(st.integers(1, want))
            put_off, left, step = want - took, left - took, step + 1
        assert step <= len(quotas)

    def test_the_slowest_case_fits(self):
        assert len(deferred_quota(24, 24)) >= 24
        assert len(deferred_quota(32, 1)) >= 32

    def test_steps_that_do_not_divide_are_refused(self):
        with pytest.raises(
            RequestError, match=r"gen_length / steps tokens a step: 10 is not divisible by 4$"
        ):
            deferred_quota(10, 4)


class TestStepTable:
    """Which column counts, and for how many steps."""

    def test_schedule(self):
        for transfer in ("schedule", "margin"):
            table = step_table(SamplingParams(transfer=transfer), 8, 3, 50)
            assert table.quota.tolist() == [3, 3, 2]
            assert not table.fraction.any()

    @pytest.mark.parametrize("transfer", ["threshold", "falling_threshold", "factor", "entropy_bound"])
    def test_rules_by_confidence_may_take_a_step_for_each_mask(self, transfer):
        assert len(step_table(SamplingParams(transfer=transfer), 8, 3, 50)) == 50

    @pytest.mark.parametrize("alg", ["origin", "maskgit_plus", "topk_margin", "entropy"])
    def test_timetable(self, alg):
        table = step_table(SamplingParams(alg=alg, eps=0.1), 8, 3, 50)
        assert table.fraction.tolist() == dream_fractions(3, 0.1).tolist()
        assert not table.quota.any()

    def test_deferred(self):
        table = step_table(SamplingParams(alg="confidence_threshold"), 8, 4, 50)
        assert table.quota.tolist() == deferred_quota(8, 4).tolist()
        assert not table.fraction.any()
