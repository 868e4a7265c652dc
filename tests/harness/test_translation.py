"""What lm-eval asks for, as what `LLM` is asked; no lm-eval needed."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError, RequestError
from jdllm.harness.translation import (
    Pair,
    behind,
    encode_pair,
    fitted,
    read_model_arguments,
    repeats_drawn_anew,
    request_sampling,
    rolling_windows,
    windows,
)

GREEDY = {"do_sample": False, "temperature": 0.0}
PLAIN = SamplingParams()


class TestModelArguments:
    def test_each_goes_to_whom_it_is_for(self):
        read = read_model_arguments(
            {
                "dtype": "float32",
                "memory": "8GiB",
                "steps": 8,
                "cfg_scale": 0.5,
                "mc_num": 32,
                "max_length": 9,
            }
        )
        assert read.of_llm == {"dtype": "float32", "memory": "8GiB"}
        assert read.sampling == {"steps": 8, "cfg_scale": 0.5}
        assert (read.mc_num, read.mc_batch_size, read.is_check_greedy, read.max_length) == (32, 16, True, 9)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"temprature": 1}, "model_args has 'temprature', expected some of .*cfg_scale.*pretrained"),
            ({"temperature": 1.0}, "'temperature': tasks ask for it too, so give it with --gen_kwargs"),
            ({"n": 2}, "model_args has 'n'"),
            ({"chunks": 2}, "model_args has 'chunks'"),
            ({"mc_num": 0}, "mc_num is 0, expected a positive integer"),
            ({"mc_batch_size": "8"}, "mc_batch_size is '8'"),
            ({"max_length": 1.5}, "max_length is 1.5"),
            ({"is_check_greedy": "no"}, "is_check_greedy is 'no', expected bool"),
        ],
    )
    def test_refused(self, given: dict[str, Any], message: str):
        with pytest.raises(ConfigError, match=message):
            read_model_arguments(given)


class TestRequestSampling:
    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ({}, {}),
            (GREEDY, {}),
            ({"do_sample": False, "temperature": 0.7}, {}),
            ({"do_sample": False, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, {}),
            ({"do_sample": True}, {"temperature": 1.0}),
            ({"do_sample": True, "temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
            ({"temperature": 0.5}, {"temperature": 0.5}),
            ({"until": ["\n\n", ""], "num_beams": 1}, {"stop": ("\n\n",)}),
            ({"until": "Q:"}, {"stop": ("Q:",)}),
            ({"until": None}, {}),
            ({"until": ["a"], "stop": ["b"]}, {"stop": ("a", "b")}),
            ({"max_gen_toks": 40}, {"max_tokens": 40}),
            ({"max_new_tokens": 40}, {"max_tokens": 40}),
            ({"max_gen_toks": 40, "max_tokens": 50}, {"max_tokens": 40}),
            ({"cache": "dual", "block_length": 32}, {"cache": "dual", "block_length": 32}),
        ],
    )
    def test_generation_arguments(self, asked: dict[str, Any], expected: dict[str, Any]):
        assert request_sampling(PLAIN, {}, asked) == SamplingParams(**expected)

    def test_a_tasks_length_brings_its_own_steps(self):
        default = SamplingParams(gen_length=64, steps=32, block_length=16)
        found = request_sampling(default, {}, {"max_gen_toks": 40})
        assert (found.gen_length, found.max_tokens, found.steps, found.block_length) == (48, 40, None, 16)
        assert request_sampling(default, {}, {}).steps == 32

    def test_named_steps_hold_whatever_the_length(self):
        found = request_sampling(PLAIN, {"steps": 8}, {"max_gen_toks": 40})
        assert (found.gen_length, found.steps) == (40, 8)

    @pytest.mark.parametrize(("length", "cut"), [(40, 40), (4096, 128)])
    def test_a_named_gen_length_is_only_cut(self, length: int, cut: int):
        chosen: dict[str, Any] = {"gen_length": 128, "steps": 64, "block_length": 32}
        found = request_sampling(PLAIN, chosen, {"max_gen_toks": length})
        assert found == SamplingParams(**chosen, max_tokens=cut)

    def test_a_task_goes_before_the_model_arguments(self):
        assert request_sampling(PLAIN, {"cache": "dual"}, {"cache": "prefix"}).cache == "prefix"

    def test_filters_of_dreams_sampler_hold_without_a_temperature(self):
        chosen = {"alg": "entropy", "top_p": 0.9}
        assert request_sampling(PLAIN, chosen, {**GREEDY, "top_p": 0.5}).top_p == 0.9

    @pytest.mark.parametrize(
        ("chosen", "asked", "message"),
        [
            ({}, {"num_beams": 4}, "'num_beams', expected until, max_gen_toks"),
            ({}, {"n": 2}, "arguments have 'n'"),
            ({}, {"do_sample": "yes"}, "do_sample is 'yes', expected True or False"),
            ({}, {"until": [3]}, "stop"),
            ({}, {"max_gen_toks": 0}, "max_gen_toks is 0"),
            ({"cache": "fast"}, {}, "cache is 'fast'"),
            ({"threshold": 0.5}, {}, "threshold has no effect"),
        ],
    )
    def test_refused(self, chosen: dict[str, Any], asked: dict[str, Any], message: str):
        with pytest.raises(RequestError, match=message):
            request_sampling(PLAIN, chosen, asked)


def test_what_is_asked_again_is_drawn_anew():
    drawn, other = SamplingParams(temperature=1.0, seed=7), SamplingParams(temperature=0.5, seed=7)
    made = repeats_drawn_anew(["a", "b", "a", "a", "a"], [drawn, drawn, drawn, other, drawn])
    assert [one.seed for one in made[:2]] == [7, 7]
    assert made[3] == other
    assert len({one.seed for one in (made[0], made[2], made[4])}) == 3
    assert [dataclasses.replace(one, seed=7) for one in made] == [drawn, drawn, drawn, other, drawn]
    assert made == repeats_drawn_anew(["a", "b", "a", "a", "a"], [drawn, drawn, drawn, other, drawn])


def test_fresh_seeds_stay_fresh():
    fresh = SamplingParams(temperature=1.0, seed=None)
    assert repeats_drawn_anew(["a", "a"], [fresh, fresh]) == [fresh, fresh]


def words(text: str) -> list[int]:
    """A tokenizer that puts 1 before each text and joins a space to the word after it: "a b" is "a", " b"."""
    pieces, at = [], 0
    for i, character in enumerate(text):
        if i > at and character == " ":
            pieces.append(text[at:i])
            at = i
    pieces += [text[at:]] if text[at:] else []
    return [1, *(sum(map(ord, piece)) for piece in pieces)]


class TestPairs:
    @pytest.mark.parametrize(
        ("context", "continuation", "expected"),
        [
            ("ab", " cd", (["ab"], [" cd"])),
            ("ab ", "cd", (["ab"], [" cd"])),
            ("a b", " c d", (["a", " b"], [" c", " d"])),
            ("", "ab", ([], ["ab"])),
            ("a", "b", (["a"], ["b"])),  # one token together, "ab"
        ],
    )
    def test_tokens_lie_as_in_one_text(
        self, context: str, continuation: str, expected: tuple[list[str], list[str]]
    ):
        prompt, answer = ([i for piece in side for i in words(piece)[1:]] for side in expected)
        assert encode_pair(words, context, continuation) == Pair([1, *prompt], answer)

    @given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 20))
    def test_the_beginning_of_a_prompt_gives_way(self, prompt: int, answer: int, length: int):
        pair = Pair(list(range(prompt)), list(range(answer)))
        kept = fitted(pair, length)
        assert kept.answer == pair.answer
        assert len(kept.prompt) == min(prompt, max(length - answer, 0))
        assert pair.prompt[prompt - len(kept.prompt) :] == kept.prompt

    def test_as_much_of_a_prompt_is_left_as_is_needed(self):
        assert fitted(Pair([1, 2], [3, 4, 5]), 3, least=1) == ([2], [3, 4, 5])
        assert fitted(Pair([], [3]), 1, least=1) == ([], [3])

    def test_an_answer_may_begin_with_what_it_is_behind(self):
        assert behind(1, [5, 6]) == ([1], [5, 6])
        assert behind(1, [1, 5]) == ([1], [5])
        assert behind(1, []) == ([1], [])

    def test_rolling_windows_are_those_of_lm_evals_documentation(self):
        parts = rolling_windows(range(10), -1, 4)
        assert parts == [([-1], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]

    @given(st.integers(0, 40), st.integers(1, 12))
    def test_rolling_windows_score_each_token_once_behind_others(self, count: int, length: int):
        parts = rolling_windows(range(count), -1, length)
        assert [token for part in parts for token in part.answer] == list(range(count))
        for part in parts:
            whole = [*part.prompt, *part.answer]
            assert whole == list(range(whole[0], whole[0] + len(whole)))
            assert len(part.prompt) > 0
            assert len(whole) - 1 <= length
        assert all(len(part.prompt) == 1 for part in parts[:-1])
        if count > length:
            assert len(parts[-1].prompt) + len(parts[-1].answer) == length + 1

    @given(st.integers(0, 40), st.integers(1, 12))
    def test_windows_score_each_token_once_with_as_much_before_the_last_as_fits(
        self, count: int, length: int
    ):
        ids = list(range(count))
        parts = windows(ids, length)
        assert [token for part in parts for token in part.answer] == ids
        for part in parts:
            assert 0 < len(part.answer) <= length
            whole = [*part.prompt, *part.answer]
            assert whole == list(range(whole[0], whole[0] + len(whole)))
        assert not any(part.prompt for part in parts[:-1])
        if count > length:
            assert len(parts[-1].prompt) + len(parts[-1].answer) == length
