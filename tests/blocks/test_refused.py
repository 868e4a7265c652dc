"""What block models do not do is refused with its name."""

import dataclasses
from typing import Any

import pytest

from jdllm.chunks import ChunkConfig
from jdllm.decoding.causal_sampling import check_causal, check_denoising
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError, RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.serving.blocks.request import block_spec
from tests.blocks.recorded import SDAR
from tests.helpers import Golden

MASK = 317


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cache": "dual"}, r"^a block model stores finished blocks, which is exact: leave cache at 'none'"),
        ({"suffix_window": 4}, "leave suffix_window at None"),
        ({"cfg_scale": 1.0}, "leave cfg_scale at 0.0"),
        ({"alg": "entropy"}, "commits by transfer rules: leave alg at None"),
        ({"prefilling": "dream"}, "leave prefilling at None"),
        ({"transfer": "adaptive"}, "a block model has no verifier"),
        ({"presence_penalty": 1.0}, "presence_penalty is for causal models"),
        ({"block_length": 24}, "block_length is 24, expected a divisor of 64, such as 4"),
        ({"small_block_length": 3}, "small_block_length is 3, expected a divisor of the block's 4 positions"),
        ({"block_length": 128}, "block_length is 128, expected a divisor of 64"),
        (
            {"gen_length": 10, "steps": 16},
            "steps 16 is not divisible by the 3 blocks of 4 that gen_length 10",
        ),
        ({"stop": "x"}, "stop strings need tokenizer files"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_requests(sdar: LLM, options: dict[str, Any], told: str):
    with pytest.raises(RequestError, match=told):
        sdar.generate(prompt_token_ids=[[1, 2, 3]], sampling=SamplingParams(**options))


def test_a_mask_in_the_prompt(sdar: LLM):
    with pytest.raises(RequestError, match="the prompt contains the mask id 317 at position 1"):
        sdar.generate(prompt_token_ids=[[1, MASK]], sampling=SamplingParams(gen_length=4))


def test_a_model_without_a_mask(config: ModelConfig):
    with pytest.raises(RequestError, match="the model has no mask id"):
        block_spec([1], SamplingParams(gen_length=4), dataclasses.replace(config, mask_id=None))


def test_what_sees_whole_sequences(sdar: LLM):
    for what, call in {
        "choose": lambda: sdar.choose([1], [[2], [3]]),
        "conditionals": lambda: sdar.conditionals([[1, MASK]], [1], [2]),
        "pseudo_likelihood": lambda: sdar.pseudo_likelihood([1, 2]),
    }.items():
        with pytest.raises(RequestError, match=rf"^{what} is for models that see whole sequences"):
            call()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chunks": ChunkConfig()}, "chunks are for steps of whole sequences"),
        (
            {"verifier": Golden("qwen2").directory, "verifier_shares_ids": True},
            "a verifier is for models that see whole sequences",
        ),
    ],
    ids=["chunks", "verifier"],
)
def test_options_of_other_models(options: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        LLM(SDAR.directory, max_num_batched_tokens=128, progress=False, **options)


def test_an_end_inside_of_a_block_is_for_block_models(sdar: LLM):
    sampling = SamplingParams(gen_length=4, stop_in_block=True)
    [output] = sdar.generate(prompt_token_ids=[[1, 2, 3]], sampling=sampling)
    assert len(output.token_ids) == 4
    for check, told in (
        (check_denoising, "for block models"),
        (check_causal, "a causal model has no blocks"),
    ):
        with pytest.raises(RequestError, match=f"^stop_in_block is .*{told}"):
            check(sampling)
