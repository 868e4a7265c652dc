"""The operands of the measurement of Split-S attention."""

import jax
import pytest

from benchmarks.operators import split_attention
from benchmarks.operators.split_attention import candidates, draw
from jdllm.pallas.hopper import SHARED_BYTES


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_the_bytes_that_a_call_moves_are_those_of_a_layer(in_8_bits: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(split_attention, "POOL_BYTES", 2**17)
    drawn = draw(4, 2, 128, in_8_bits=in_8_bits)
    pool_bytes = sum(part.nbytes for part in jax.tree.leaves((drawn.k, drawn.v)))
    assert drawn.moved * drawn.k.shape[0] == pool_bytes >= 2**17


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("rows", [32, 128, 224, 512])
def test_cuts_that_are_tried_fit_shared_memory(rows: int, in_8_bits: bool):
    for tiles in candidates(rows, in_8_bits):
        assert tiles.rows >= rows
        assert tiles.shared_bytes(split_attention.HEAD_DIM) <= SHARED_BYTES
