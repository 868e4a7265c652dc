"""The blocks of a request, where its text ends, and what is refused."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.serving.spec import Block
from tests.engines import generation_request, infill_request

MASK, EOS = 510, 505


def params(**options) -> SamplingParams:
    return SamplingParams(**{"gen_length": 6, **options})


def spans(blocks: Sequence[Block]) -> list[tuple[int, int, int, list[int]]]:
    """Start, stop, masks and tokens of each step."""
    return [(b.start, b.stop, b.masks, b.table.quota.tolist()) for b in blocks]


def test_blocks_of_a_generation(config: ModelConfig):
    request = generation_request(0, np.arange(4), params(block_length=3, steps=4), config)
    assert spans(request.blocks) == [(4, 7, 3, [2, 1]), (7, 10, 3, [2, 1])]
    assert request.tokens.tolist() == [0, 1, 2, 3] + [MASK] * 6
    assert request.candidates().tolist() == [4, 5, 6]


def test_blocks_of_an_infill_count_masks_not_positions(config: ModelConfig):
    tokens = np.array([MASK, 1, MASK, 2, 3, MASK, MASK, 4, MASK])
    request = infill_request(0, tokens, params(block_length=2), config)
    assert spans(request.blocks) == [(0, 3, 2, [1, 1]), (5, 7, 2, [1, 1]), (8, 9, 1, [1])]
    whole = infill_request(0, tokens, params(steps=3), config)
    assert spans(whole.blocks) == [(0, 9, 5, [2, 2, 1])]


def test_masks_in_the_prompt_are_candidates_of_every_block(config: ModelConfig):
    prompt = np.array([1, MASK, 2])
    request = generation_request(0, prompt, params(block_length=3, prompt_masks="official"), config)
    assert request.candidates().tolist() == [1, 3, 4, 5]
    assert request.blocks[0].masks == 3


def test_dreams_quota_counts_masks_in_the_prompt(config: ModelConfig):
    prompt = np.array([1, MASK, MASK])
    sampling = params(alg="confidence_threshold", steps=4, prompt_masks="official")
    request = generation_request(0, prompt, sampling, config)
    masks = len(request.candidates())
    assert masks == 8
    assert (request.block.table.quota + masks)[:4].tolist() == [2, 4, 6, 8]  # while nothing commits
    assert len(request.block.table) >= masks


class TestEndOfText:
    def generated(self, config: ModelConfig, tokens: list[int], **options):
        request = generation_request(0, np.array([EOS, 1]), params(**options), config)
        request.tokens[2:] = tokens
        return request

    def test_first_end_of_the_generated_part(self, config: ModelConfig):
        assert self.generated(config, [3, EOS, 4, EOS, 5, 5]).end_of_text() == 1
        assert self.generated(config, [3, 4, 4, 4, 5, 5]).end_of_text() is None

    def test_not_before_everything_in_front_is_filled(self, config: ModelConfig):
        assert self.generated(config, [3, MASK, EOS, MASK, 5, 5]).end_of_text() is None
        assert self.generated(config, [3, 4, EOS, MASK, 5, 5]).end_of_text() == 2

    def test_either_end_id_ends_it(self, config: ModelConfig):
        both = dataclasses.replace(config, eot_id=500)
        assert self.generated(both, [3, 500, EOS, 4, 5, 5]).end_of_text() == 1

    def test_an_infill_has_no_end(self, config: ModelConfig):
        request = infill_request(0, np.array([1, EOS, MASK]), params(), config)
        request.advance(np.array([2]), np.array([EOS]), np.zeros(1))
        assert request.finished
        assert request.end_of_text() is None


class TestRefused:
    @pytest.mark.parametrize("make", [generation_request, infill_request])
    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([1, 2, 512], r"512 at position 2 .*\(0 to 511\)"),
            ([-1, 2], "-1 at position 0"),
            ([1.0, 2.0], "flat list of integers"),
            ([[1, 2]], "flat list of integers"),
            ([[1], [1, 2]], "flat list of integers"),
            (["a"], "flat list of integers"),
            (7, "flat list of integers"),
            ([2**70], "flat list of integers"),
        ],
    )
    def test_ids(self, make, ids: object, message: str, config: ModelConfig):
        with pytest.raises(RequestError, match=message):
            make(0, ids, params(), config)

    def test_mask_in_the_prompt(self, config: ModelConfig):
        with pytest.raises(RequestError, match=r"mask id 510 at position 1: .*infill"):
            generation_request(0, np.array([1, MASK]), params(), config)

    def test_lengths_that_do_not_divide(self, config: ModelConfig):
        with pytest.raises(RequestError, match="not divisible by block_length 4"):
            generation_request(0, np.array([1]), params(block_length=4), config)
        with pytest.raises(RequestError, match="not divisible by the number of blocks 2"):
            generation_request(0, np.array([1]), params(block_length=3, steps=3), config)
        with pytest.raises(RequestError, match=r"number of blocks 2 \(3 masks / block_length 2\)"):
            infill_request(0, np.array([1, MASK, MASK, MASK]), params(block_length=2, steps=3), config)

    def test_steps_that_do_not_divide_the_masks_of_a_deferring_rule(self, config: ModelConfig):
        sampling = params(alg="confidence_threshold", steps=4)
        with pytest.raises(RequestError, match="6 is not divisible by 4"):
            generation_request(0, np.array([1]), sampling, config)
        with pytest.raises(RequestError, match="3 is not divisible by 4"):
            infill_request(0, np.array([MASK, MASK, 1, MASK]), sampling, config)

    def test_nothing_to_infill(self, config: ModelConfig):
        with pytest.raises(RequestError, match=r"nothing to infill.*510"):
            infill_request(0, np.array([1, 2]), params(), config)

    def test_a_model_without_a_mask_id(self, config: ModelConfig):
        causal = dataclasses.replace(config, mask_id=None)
        for make in (generation_request, infill_request):
            with pytest.raises(RequestError, match=r"no mask id .*mask_token_id"):
                make(0, np.array([1]), params(), causal)

    def test_a_mask_id_outside_the_vocabulary(self, config: ModelConfig):
        wrong = dataclasses.replace(config, mask_id=512)
        with pytest.raises(RequestError, match=r"mask id 512 .*outside the vocabulary \(0 to 511\)"):
            generation_request(0, np.array([1]), params(), wrong)

    @pytest.mark.parametrize("mode", ["official", "fixed"])
    def test_end_options_without_end_ids(self, mode: str, config: ModelConfig):
        with pytest.raises(
            RequestError, match=r"confidence_eos_eot_inf needs the end-of-turn id.*eot_token_id"
        ):
            generation_request(0, np.array([1]), params(confidence_eos_eot_inf=mode), config)
        endless = dataclasses.replace(config, eos_id=None)
        with pytest.raises(RequestError, match=r"logits_eos_inf needs the end-of-sequence id.*eos_token_id"):
            generation_request(0, np.array([1]), params(logits_eos_inf=True), endless)
