"""The bytes of published models follow from their configurations."""

import pytest

from benchmarks.shapes import SHAPES
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import param_bytes
from tests.models.published_configs import (
    DREAM_7B,
    FAST_DLLM_7B,
    LLADA2_FLASH,
    LLADA2_MINI,
    NEMOTRON_8B,
    QWEN3_8B,
    SDAR_8B,
    SDAR_30B,
)


def test_dream_7b_has_the_published_bytes():
    config = config_from_hf(DREAM_7B)
    assert param_bytes(config, "bfloat16") == 15_231_233_024


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        (QWEN3_8B, 8_190_735_360),
        (
            QWEN3_8B
            | {
                "hidden_size": 1024,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "intermediate_size": 3072,
                "max_window_layers": 28,
                "tie_word_embeddings": True,
            },
            596_049_920,
        ),
    ],
    ids=["8B", "0.6B"],
)
def test_qwen3_has_the_published_bytes(values, parameters):
    assert param_bytes(config_from_hf(values), "bfloat16") == 2 * parameters


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        (FAST_DLLM_7B, 7_615_616_512),
        (LLADA2_MINI, 16_255_643_392),
        (LLADA2_FLASH, 102_889_705_216),
        (NEMOTRON_8B, 8_489_553_920),
        (SDAR_8B, 8_190_735_360),
        (SDAR_30B, 30_532_122_624),
    ],
    ids=["Fast-dLLM-v2-7B", "LLaDA2-mini", "LLaDA2-flash", "Nemotron-8B", "SDAR-8B", "SDAR-30B-A3B"],
)
def test_block_models_have_the_published_bytes(values, parameters):
    assert param_bytes(config_from_hf(values), "bfloat16") == 2 * parameters


def test_bytes_of_a_mixture_include_all_experts():
    config = SHAPES["llada-moe-7b"]
    expert = 3 * 2048 * 1024
    attention = 4 * 2048 * 2048 + 2 * 128 + 2 * 2048
    elements = 16 * (64 * expert + 64 * 2048 + attention) + 2 * 157184 * 2048 + 2048
    assert param_bytes(config, "bfloat16") == 2 * elements
