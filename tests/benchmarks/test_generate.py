"""The generation benchmark on a small model."""

import pytest
from flax import nnx

from benchmarks.generate import measure
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.models.module import Transformer
from tests.benchmarks.shapes import small


def test_a_row_counts_tokens_and_steps():
    llm = LLM(Transformer(small("llada-8b"), rngs=nnx.Rngs(0), dtype="float32"), progress=False)
    sampling = SamplingParams(gen_length=8, block_length=4, cache="dual", early_stop=False)
    row = measure(llm, 2, 5, sampling)
    assert row["steps"] == row["evaluated"] == 8
    assert row["tokens_s"] * row["seconds"] == pytest.approx(16)
    assert row["steps_ms"] * 8 == pytest.approx(1e3 * row["seconds"])
