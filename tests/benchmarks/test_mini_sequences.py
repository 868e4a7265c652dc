"""The planned peaks of whole prompts, against sums of the arrays that have to be alive."""

import pytest

from benchmarks.planning.mini_sequences import FFN_ROWS, LOGITS_ROWS, mini_sequences, peaks
from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.planning.aot import device_of

MIB = 2**20


@pytest.mark.parametrize("shape", CAUSAL_SHAPES)
@pytest.mark.parametrize("cut", [False, True])
def test_peaks_are_those_of_the_largest_arrays(shape: str, cut: bool):
    """Gate, up and product beside the residual stream in 16 bits; logits in 32, and as much to choose."""
    config, tokens = CAUSAL_SHAPES[shape], 65536
    found = peaks(config, device_of("h200", "xla"), tokens, cut=cut)
    stream = 2 * tokens * config.hidden_size
    ffn = 3 * 2 * (FFN_ROWS if cut else tokens) * config.intermediate_size + stream
    logits = 2 * 4 * (LOGITS_ROWS if cut else tokens) * config.vocab_size + stream
    assert found.logits == pytest.approx(logits, rel=0.03, abs=32 * MIB)
    assert ffn <= found.ffn <= ffn + 2 * 2 * FFN_ROWS * config.hidden_size + 32 * MIB
    assert found.total >= max(found.ffn, found.logits)


def test_the_kernel_of_the_head_keeps_no_logits():
    config = CAUSAL_SHAPES["qwen2.5-7b"]
    fused, plain = (peaks(config, device_of("h200", k), 8192, cut=False) for k in ("auto", "xla"))
    assert fused.logits < 4 * 8192 * config.vocab_size / 8 < plain.logits


def test_the_table():
    [first, *_] = table = mini_sequences(["llama-3.1-8b"], [8192])
    assert [row["kernels"] for row in table] == ["auto", "xla"]
    assert first["lower_by"] == float(first["total_gib"]) / float(first["cut_total_gib"])
    assert 0 < float(first["in_parts_gib"]) < float(first["total_gib"]) * 1.1
