"""Where a text ends: stop ids, stop strings and the most tokens; what is still run, and what is returned."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jdllm.checkpoints.token_text import Ids
from jdllm.decoding.encoded_trace import LISTED
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.outputs import CompletionOutput, request_output
from jdllm.serving.request import Request
from tests.engines import generation_request, infill_request

EOS, SPECIAL = 505, 300
TEXT = "one two.\nthree four\n\nfive"


def decode(ids: Ids, before: Ids = (), *, final: bool = True) -> str:
    """A token a byte of ASCII; others are special, and no text."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def run(config: ModelConfig, script: str | list[int], **options: Any) -> tuple[Request, CompletionOutput]:
    """A request that commits `script` block by block, the last token of each block first."""
    tokens = np.array(list(script.encode()) if isinstance(script, str) else script)
    sampling = SamplingParams(**{"gen_length": len(tokens), "logprobs": True, **options})
    request = generation_request(0, np.array([7]), sampling, config, decode)
    while not request.finished:
        position = request.candidates()[-1:]
        request.advance(position, tokens[position - 1], -position.astype(np.float32))
    return request, request_output(None, 0, [request], decode).outputs[0]


@pytest.mark.parametrize(
    ("stop", "kept", "text"),
    [
        ("\n", "one two.\n", "one two."),
        (["\n\n", "wo."], "one two.", "one t"),
        ("four\n", "one two.\nthree four\n", "one two.\nthree "),
        (["ee", "thr", "three"], "one two.\nthr", "one two.\n"),
        ("one", "one", ""),
    ],
)
def test_a_stop_string_cuts_the_text_before_it(config: ModelConfig, stop: Any, kept: str, text: str):
    request, output = run(config, TEXT, stop=stop)
    assert (output.text, output.finish_reason) == (text, "stop")
    assert output.token_ids == list(kept.encode())
    assert request.steps == len(TEXT)  # one block, which is run to its end


@pytest.mark.parametrize("stop", [(), "six", ["five "]])
def test_without_one_in_the_text_nothing_is_cut(config: ModelConfig, stop: Any):
    _, output = run(config, TEXT, stop=stop)
    assert (output.text, output.finish_reason) == (TEXT, "length")


@pytest.mark.parametrize(("block_length", "steps"), [(5, 10), (25, 25), (1, 9)])
def test_generation_ends_after_the_block_with_the_stop_string(
    config: ModelConfig, block_length: int, steps: int
):
    request, output = run(config, TEXT, stop=".\n", block_length=block_length)
    assert request.steps == steps
    assert (output.text, output.nfe) == ("one two", steps)


def test_without_early_stop_all_ids_are_there_and_the_text_is_the_same(config: ModelConfig):
    request, output = run(config, TEXT, stop="\n", block_length=5, early_stop=False)
    assert request.steps == len(TEXT)
    assert (output.text, output.token_ids) == ("one two.", list(TEXT.encode()))


@pytest.mark.parametrize(("stop", "text"), [("b", "a"), ("c", "ab"), ((), "ab")])
def test_whichever_comes_first_ends_it(config: ModelConfig, stop: Any, text: str):
    _, output = run(config, [*b"ab", EOS, *b"cd"], stop=stop)
    assert (output.text, output.finish_reason) == (text, "stop")
    assert output.token_ids == [*b"ab", EOS][: 2 if stop == "b" else 3]


def test_each_of_several_stop_ids_ends_it(config: ModelConfig):
    for end in (EOS, SPECIAL, 98):
        _, output = run(config, [97, end, 99, EOS], stop_token_ids=[SPECIAL, 98])
        assert (output.text, output.token_ids, output.finish_reason) == ("a", [97, end], "stop")
    _, output = run(config, [97, SPECIAL, 99, EOS])
    assert output.token_ids == [97, SPECIAL, 99, EOS]


def test_all_end_ids_of_the_model_end_it(config: ModelConfig):
    several = dataclasses.replace(config, eos_id=EOS, more_eos_ids=(400, 401), eot_id=SPECIAL)
    for end in (EOS, 400, 401, SPECIAL):
        assert run(several, [97, end, 99])[1].token_ids == [97, end]


@pytest.mark.parametrize(("most", "steps"), [(1, 5), (5, 5), (6, 10), (25, 25)])
@pytest.mark.parametrize("early_stop", [True, False])
def test_no_more_than_max_tokens_are_returned_or_run(
    config: ModelConfig, most: int, steps: int, early_stop: bool
):
    options = {"max_tokens": most, "gen_length": 25, "block_length": 5, "early_stop": early_stop}
    request, output = run(config, TEXT, **options)
    assert (output.text, output.token_ids) == (TEXT[:most], list(TEXT[:most].encode()))
    assert (output.finish_reason, request.steps) == ("length", steps)


def test_an_end_beyond_max_tokens_is_none(config: ModelConfig):
    _, output = run(config, [*b"abc", EOS], max_tokens=3, gen_length=4)
    assert (output.text, output.finish_reason) == ("abc", "length")
    _, output = run(config, [*b"abc", EOS], max_tokens=4)
    assert (output.text, output.finish_reason) == ("abc", "stop")
    _, output = run(config, TEXT, max_tokens=8, gen_length=25, stop=["\n", "two"])
    assert (output.text, output.finish_reason) == ("one ", "stop")


def test_max_tokens_with_a_verifier_ends_when_they_are_there(config: ModelConfig):
    sampling = SamplingParams(gen_length=9, max_tokens=4, transfer="adaptive")
    request = generation_request(0, np.array([7]), sampling, config)
    for step in range(2):
        assert not request.finished, step
        request.advance(request.candidates()[:2], np.array([97, 98]), np.zeros(2))
    assert request.finished
    assert request_output(None, 0, [request], decode).token_ids == [97, 98, 97, 98]


def test_log_probabilities_and_steps_belong_to_the_kept_tokens(config: ModelConfig):
    _, output = run(config, TEXT, stop="\n", block_length=5)
    assert output.logprobs == [-float(i + 1) for i in range(9)]  # `run` takes them from the positions
    assert output.committed_in == [4, 3, 2, 1, 0, 9, 8, 7, 6]
    _, output = run(config, TEXT, logprobs=False)
    assert (output.logprobs, output.committed_in) == (None, None)


def test_given_tokens_of_an_infill_have_none(config: ModelConfig):
    sampling = SamplingParams(logprobs=True)
    request = infill_request(0, np.array([1, 510, 2, 510]), sampling, config)
    request.advance(np.array([3]), np.array([5]), np.array([-0.5]))
    request.advance(np.array([1]), np.array([6]), np.array([-0.25]))
    output = request_output(None, 0, [request], None)
    assert output.token_ids == [1, 6, 2, 5]
    assert output.logprobs == [None, -0.25, None, -0.5]
    assert output.top_logprobs is None
    assert output.committed_in == [None, 1, None, 0]


def test_the_chosen_token_is_listed_whatever_is_likeliest(config: ModelConfig):
    request = infill_request(0, np.array([1, 510, 2, 510]), SamplingParams(logprobs=2), config)
    listed = np.array([[(5, -0.5), (4, -1.0)], [(8, -0.25), (9, -np.inf)]], LISTED)
    values = np.array([-0.5, -3.0], np.float32)
    request.advance(np.array([1, 3]), np.array([5, 6]), values, listed)
    output = request_output(None, 0, [request], None)
    assert output.top_logprobs == [None, {5: -0.5, 4: -1.0}, None, {8: -0.25, 6: -3.0}]


class TestRefused:
    def test_stop_strings_without_a_tokenizer(self, config: ModelConfig):
        with pytest.raises(RequestError, match=r"stop strings need tokenizer files.*use stop_token_ids"):
            generation_request(0, np.array([1]), SamplingParams(stop=("a",)), config)

    def test_stop_ids_outside_the_vocabulary(self, config: ModelConfig):
        with pytest.raises(RequestError, match=r"stop_token_ids has 512, outside .*\(0 to 511\)"):
            generation_request(0, np.array([1]), SamplingParams(stop_token_ids=(3, 512)), config)

    @pytest.mark.parametrize("options", [{"stop": "a"}, {"stop_token_ids": [5]}])
    def test_stops_of_an_infill(self, options: dict[str, Any], config: ModelConfig):
        with pytest.raises(RequestError, match="infill has no end to stop at"):
            infill_request(0, np.array([1, 510]), SamplingParams(**options), config)
