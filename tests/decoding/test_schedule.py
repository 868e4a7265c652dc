"""Tokens per step, against the recorded table of the official code."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.decoding.schedule import block_steps, transfer_schedule
from jdllm.errors import RequestError
from tests.helpers import Golden

TABLE = Golden("llada").json("transfer_table")


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
